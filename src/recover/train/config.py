"""Settings of the reference trainer, checked where they are made. Layer: train; no torch."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

PRESETS = ("tiny", "small")
DATA = ("exact", "stream")
POLICIES = ("static", "adaptive")
RESTORE = ("auto", "blocking", "non_blocking")
DTYPES = ("float32", "bfloat16")
STACKS = ("plain", "ddp")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run. Raises ValueError naming the setting, its value and what is allowed."""

    replicas: int = 4
    microbatches: int = 16
    """B: microbatches of every committed step."""
    steps: int = 30
    preset: str = "tiny"
    data: str = "exact"
    seed: int = 0
    policy: str = "static"
    restore: str = "auto"
    dtype: str = "float32"
    stack: str = "plain"
    in_place: bool = False
    """Reduce in the accumulators and keep real snapshots."""
    sequences: int = 2
    """Sequences in a microbatch."""
    learning_rate: float = 1e-3
    """Peak of the schedule."""
    warmup: int = 5
    """Steps of linear warm-up."""
    clip_norm: float = 1.0
    bucket_mb: float = 25.0
    text: tuple[str, ...] = ()
    """Text files; none means the default text."""

    def __post_init__(self) -> None:
        for name in ("replicas", "microbatches", "steps", "sequences"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("seed", "warmup"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("learning_rate", "clip_norm", "bucket_mb"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            _require(value in allowed, name, value, f"one of {', '.join(allowed)}")
        if self.policy == "adaptive":
            enough = self.microbatches >= self.replicas
            _require(enough, "microbatches", self.microbatches, "at least replicas (adaptive)")
        for file in map(Path, self.text):
            _require(file.is_file(), "text", str(file), "an existing file")
            _require(file.stat().st_size > 0, "text", str(file), "a file that is not empty")

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
    "stack": STACKS,
}


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value}")
