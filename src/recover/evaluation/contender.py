"""What a contender is asked to do, and what it leaves. Layer: evaluation.

Every contender gets the same :class:`Task`: model, text, seed, optimizer, order of microbatches,
emulated device and kills. Every contender returns a :class:`Trace` on the wall clock of this host,
so that whoever compares them reads one format. How each of them works is said in its own module.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from recover.train.config import PRESETS

CONTENDERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "reference": "plain DDP over gloo that is never killed",
        "recover": "ReCoVer: the microbatches of a step stay as they are",
        "adaptive": "ReCoVer's strawman: the microbatches of a step shrink with the world",
        "checkpoint": "DDP over gloo under torchrun: save, restart all replicas, load, rerun",
        "checkpoint_shrinks": "the same, where no spare replaces a dead replica",
        "torchft": "torchft: throw the step away and go on with fewer microbatches",
    }
)
"""Every contender by name, in one line each."""

_HOMES = {
    "reference": "ddp_job",
    "recover": "recover_job",
    "adaptive": "recover_job",
    "checkpoint": "ddp_job",
    "checkpoint_shrinks": "ddp_job",
    "torchft": "torchft_job",
}


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed optimizer step of a contender, as its survivors saw it."""

    step: int
    """Number of the step, from 0; a step that is rerun appears again."""
    loss: float
    """Mean over the microbatches in it."""
    microbatches: int
    tokens: int
    devices: int
    """Devices (one per replica) that were alive when it committed."""
    time: float
    """Seconds since 1970."""
    rerun: bool = False
    """Checkpoint-restart: the step had been committed before a failure."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Anything else on the same clock; every contender's module lists the names that it leaves."""

    name: str
    time: float
    """Seconds since 1970."""
    step: int | None = None
    facts: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of one contender left."""

    contender: str
    commits: tuple[Commit, ...]
    """In the order of their times."""
    moments: tuple[Moment, ...]
    """In the order of their times."""
    settings: Mapping[str, object]
    """The task, and what the contender adds: its own settings, versions, what is emulated."""

    def save(self, path: Path) -> None:
        """Write the trace as JSON lines: a head, then commits, then moments."""
        head: dict[str, object] = {"kind": "trace", "contender": self.contender}
        lines = [head | {"settings": dict(self.settings)}]
        lines += [{"kind": "commit", **asdict(commit)} for commit in self.commits]
        lines += [{"kind": "moment", **asdict(moment)} for moment in self.moments]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read what :meth:`save` wrote; raises ValueError, with file and line, where it is not."""
        commits: list[Commit] = []
        moments: list[Moment] = []
        head: dict[str, object] | None = None
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                values = json.loads(line)
                kind = values.pop("kind")
                if kind == "trace":
                    head = values
                elif kind == "commit":
                    commits.append(Commit(**values))
                else:
                    moments.append(Moment(**values))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a line of a trace: {error}") from None
        if head is None:
            raise ValueError(f"{path}: not a trace: the line with its settings is missing")
        settings = cast(dict[str, object], head["settings"])
        return cls(str(head["contender"]), tuple(commits), tuple(moments), settings)

    def times(self, name: str) -> tuple[float, ...]:
        """Return when the moments of this name were."""
        return tuple(moment.time for moment in self.moments if moment.name == name)


@dataclass(frozen=True, slots=True, order=True)
class Kill:
    """SIGKILL to a replica inside the gradient synchronisation of a step.

    The first bucket has been reduced by then, and the others wait in the second.
    """

    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Task:
    """What every contender is asked to do. Raises ValueError naming the setting and its value."""

    replicas: int = 4
    accumulation: int = 4
    """Microbatches of a replica while all live: B = replicas x accumulation."""
    steps: int = 20
    preset: str = "tiny"
    sequences: int = 2
    """Sequences in a microbatch."""
    seed: int = 0
    learning_rate: float = 1e-3
    microbatch_ms: float = 0.0
    """Emulated device: a microbatch takes at least so long; 0 emulates nothing."""
    bandwidth_mbps: float = 0.0
    """Emulated network in megabits per second; 0 emulates nothing."""
    kills: tuple[Kill, ...] = ()
    checkpoint_every: int = 0
    """N: steps between two checkpoints; 0 saves none. Other contenders ignore it."""

    def __post_init__(self) -> None:
        for name in ("replicas", "accumulation", "steps", "sequences"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("seed", "microbatch_ms", "bandwidth_mbps", "checkpoint_every"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0")
        _require(self.preset in PRESETS, "preset", self.preset, f"one of {', '.join(PRESETS)}")
        replicas = [kill.replica for kill in self.kills]
        for kill in self.kills:
            fits = 0 <= kill.step < self.steps and 0 <= kill.replica < self.replicas
            _require(fits, "kills", kill, f"in steps 0..{self.steps - 1} of {self.replicas}")
        _require(len(set(replicas)) == len(replicas), "kills", replicas, "each of another replica")
        _require(len(replicas) < self.replicas, "kills", len(replicas), "fewer than replicas")

    @property
    def microbatches(self) -> int:
        """B: microbatches of a step that nothing disturbs."""
        return self.replicas * self.accumulation


def run(
    contender: str,
    task: Task,
    out: Path,
    *,
    deadline_s: float,
    on_commit: Callable[[Commit], None] = lambda _: None,
) -> Trace:
    """Run a contender's processes to the end of the task and return what they left.

    ``out`` is a new directory for its logs and files. Nothing runs any more when this returns or
    raises. ``on_commit`` is called in this thread, soon after each commit.

    Raises ValueError for an unknown contender, and RecoverError, in one sentence, where something
    is not installed, the run failed, or ``deadline_s`` is over.
    """
    if contender not in CONTENDERS:
        raise ValueError(f"unknown contender {contender!r}; choose one of {', '.join(CONTENDERS)}")
    home = importlib.import_module(f"recover.evaluation.{_HOMES[contender]}")
    runner = cast(Callable[..., Trace], home.run)
    return runner(contender, task, out, deadline_s=deadline_s, on_commit=on_commit)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value}")
