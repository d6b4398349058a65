"""Settings of the reference trainer, checked where they are made. Layer: train; no torch."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

PRESETS = ("nano", "tiny", "tiny_moe", "small")
DATA = ("exact", "stream")
POLICIES = ("static", "adaptive")
RESTORE = ("auto", "blocking", "non_blocking")
DTYPES = ("float32", "bfloat16")
PARALLEL = ("plain", "ddp", "fsdp1", "hybrid", "fsdp2", "3d")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
SHARDED = ("fsdp1", "hybrid", "fsdp2")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run. Raises ValueError naming the setting, its value and what is allowed."""

    replicas: int = 4
    ranks_per_replica: int = 0
    """0 asks for what `parallel` needs: 1, 2 shards, or pp x ep x tp."""
    microbatches: int = 16
    """B: microbatches of every committed step."""
    steps: int = 30
    preset: str = "tiny"
    data: str = "exact"
    seed: int = 0
    policy: str = "static"
    restore: str = "auto"
    dtype: str = "float32"
    parallel: str = "plain"
    """How a replica is made of its ranks."""
    pp: int = 1
    ep: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    """Of a pipeline."""
    sequence_parallel: bool = False
    recompute: bool = False
    """Keep no activations inside blocks."""
    compiled: bool = False
    """Run blocks through torch.compile."""
    in_place: bool = False
    """Reduce in the accumulators and keep real snapshots."""
    overlap: bool = False
    """Reduce while the last backward pass runs on another thread."""
    sequences: int = 2
    """Sequences in a microbatch."""
    learning_rate: float = 1e-3
    """Peak of the schedule."""
    warmup: int = 5
    """Steps of linear warm-up."""
    clip_norm: float = 1.0
    bucket_mb: float = 25.0
    microbatch_ms: float = 0.0
    """Emulated device: a microbatch takes at least so long; 0 emulates nothing."""
    bandwidth_mbps: float = 0.0
    """Emulated network of the cross-replica reduction, in megabits per second; 0: none."""
    text: tuple[str, ...] = ()
    """Text files; none means the default text."""

    def __post_init__(self) -> None:
        for name in ("replicas", "microbatches", "steps", "sequences"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("pp", "ep", "tp"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("ranks_per_replica", "seed", "warmup", "microbatch_ms", "bandwidth_mbps"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("learning_rate", "clip_norm", "bucket_mb"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            _require(value in allowed, name, value, f"one of {', '.join(allowed)}")
        if self.policy == "adaptive":
            enough = self.microbatches >= self.replicas
            _require(enough, "microbatches", self.microbatches, "at least replicas (adaptive)")
        if self.in_place or self.parallel == "ddp":
            _require(not self.overlap, "overlap", True, "off with in_place and parallel ddp")
        self._require_shape()
        for file in map(Path, self.text):
            _require(file.is_file(), "text", str(file), "an existing file")
            _require(file.stat().st_size > 0, "text", str(file), "a file that is not empty")

    @property
    def ranks(self) -> int:
        """Ranks of a replica."""
        needed = {"plain": 1, "ddp": 1, "3d": self.pp * self.ep * self.tp}
        return self.ranks_per_replica or needed.get(self.parallel, 2)

    def _require_shape(self) -> None:
        ranks = self.ranks
        if self.parallel == "3d":
            product = self.pp * self.ep * self.tp
            shape = f"pp x ep x tp = {self.pp} x {self.ep} x {self.tp} = {product}"
            _require(ranks == product, "ranks_per_replica", ranks, shape)
            return
        only = "used with parallel 3d only"
        for name in ("pp", "ep", "tp"):
            _require(getattr(self, name) == 1, name, getattr(self, name), f"1: it is {only}")
        _require(not self.sequence_parallel, "sequence_parallel", True, f"off: it is {only}")
        if self.parallel in SHARDED:
            fits = self.sequences % ranks == 0
            _require(fits, "sequences", self.sequences, f"a multiple of ranks_per_replica={ranks}")
        else:
            _require(ranks == 1, "ranks_per_replica", ranks, f"1 (parallel {self.parallel})")

    def to_json(self) -> str:
        """Return the settings as one argument for the ranks' command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Read what :meth:`to_json` wrote."""
        values = json.loads(text)
        known = {f.name for f in fields(cls)}
        assert set(values) <= known, set(values) - known
        return cls(**values | {"text": tuple(values["text"])})


_CHOICES = {
    "preset": PRESETS,
    "data": DATA,
    "policy": POLICIES,
    "restore": RESTORE,
    "dtype": DTYPES,
    "parallel": PARALLEL,
    "schedule": SCHEDULES,
}


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value}")
