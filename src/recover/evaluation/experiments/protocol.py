"""What an experiment is: runs to make, rows from their traces, a figure and words from the rows.

Layer: evaluation. Everything here and in the experiments is pure; :mod:`recover.evaluation.bench`
runs what they plan, keeps the traces and writes what they say.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from recover.evaluation import contender
from recover.evaluation.contender import Commit, Task, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | None
Row = Mapping[str, Cell]
Traces = Mapping[str, Trace]
"""The traces of an experiment by the names that its plan gave to the runs."""

START_S, START_REPLICA_S, CORES = 4.0, 1.5, 2
MICROBATCH_S = {"nano": 0.005, "tiny": 0.015, "small": 0.5}
"""What a time estimate assumes: a start, each replica in it, cores, a core's microbatch."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the runs of an experiment are. Raises ValueError naming the option."""

    replicas: int
    accumulation: int = 8
    """Microbatches of each replica before the first failure."""
    steps: int = 0
    """0 where the failures decide it."""
    failures: int | None = None
    """Replicas to kill; None: half of them."""
    intervals: tuple[int, ...] = ()
    """Steps between failures, or between checkpoints."""
    seeds: int = 1
    """Seeds of the reference, or rounds of the same comparison."""
    seed: int = 0
    preset: str = "tiny"
    microbatch_ms: float = 0.0
    bandwidth_mbps: float = 0.0
    restart_s: float = 0.0
    """What a restart takes on this machine; the emulated device is scaled to it. 0: not scaled."""
    variants: bool = False
    """Whether to run the settings that suit the others, too."""

    def __post_init__(self) -> None:
        for name in ("replicas", "accumulation", "seeds"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("steps", "lost", "seed", "microbatch_ms", "bandwidth_mbps", "restart_s"):
            option = "failures" if name == "lost" else name
            _require(getattr(self, name) >= 0, option, getattr(self, name), "at least 0")
        for interval in self.intervals:
            even = interval >= 2 and interval % 2 == 0
            _require(even, "interval", interval, "an even number of steps")
        _require(self.lost < self.replicas, "failures", self.lost, f"under {self.replicas}")

    @property
    def lost(self) -> int:
        """Replicas that are killed."""
        return self.replicas // 2 if self.failures is None else self.failures


class Run(Protocol):
    """One run whose trace is kept; equal runs of two experiments are made once."""

    @property
    def key(self) -> str:
        """Name of its file: the same for equal runs only."""

    @property
    def estimate_s(self) -> float:
        """A rough guess at how long it takes."""

    @property
    def steps(self) -> int:
        """Calls of ``on_commit`` to expect."""

    @property
    def optional(self) -> bool:
        """Whether the experiment does without it where something is not installed."""

    def perform(
        self, out: Path, *, deadline_s: float, on_commit: Callable[[Commit], None]
    ) -> Trace:
        """Make the run in the new directory ``out``."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run of one contender."""

    contender: str
    task: Task
    optional: bool = False

    @property
    def key(self) -> str:
        """Contender, size, and a digest of all settings."""
        told = json.dumps([self.contender, asdict(self.task)], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()[:8]
        return f"{self.contender}-{self.task.replicas}x{self.task.accumulation}-{digest}"

    @property
    def steps(self) -> int:
        """Steps that are committed, those that are rerun included."""
        return self.task.steps + self._rerun

    @property
    def estimate_s(self) -> float:
        """Starts, and steps of an emulated device that is slowed down by two real cores."""
        task = self.task
        start_s = START_S + START_REPLICA_S * task.replicas
        real_s = MICROBATCH_S.get(task.preset, 0.015) * max(1.0, task.replicas / CORES)
        step_s = task.accumulation * max(task.microbatch_ms / 1000, real_s)
        if task.bandwidth_mbps:
            step_s += transferred_megabits(task.preset, task.replicas) / task.bandwidth_mbps
        starts = 1 + (len(task.kills) if self.contender.startswith("checkpoint") else 0)
        return starts * start_s + self.steps * step_s

    def perform(
        self, out: Path, *, deadline_s: float, on_commit: Callable[[Commit], None]
    ) -> Trace:
        """Run the contender."""
        return contender.run(
            self.contender, self.task, out, deadline_s=deadline_s, on_commit=on_commit
        )

    @property
    def _rerun(self) -> int:
        if not self.contender.startswith("checkpoint") or not self.task.checkpoint_every:
            return 0
        return sum(kill.step % self.task.checkpoint_every for kill in self.task.kills)


GRADIENT_MEGABITS = {"nano": 2.9, "tiny": 10.5, "small": 406.0}
"""Gradients of a preset in fp32."""


def transferred_megabits(preset: str, replicas: int) -> float:
    """Return what a ring all-reduce of a model's gradients sends over each link."""
    if preset not in GRADIENT_MEGABITS:
        known = ", ".join(GRADIENT_MEGABITS)
        raise ValueError(f"--preset must be one of {known} here, got {preset}")
    return 2 * (replicas - 1) / replicas * GRADIENT_MEGABITS[preset]


class Experiment(Protocol):
    """One question of the paper's evaluation, and how it is answered."""

    name: str
    title: str
    paper: str
    """Figures of the paper that it reproduces; empty where there is none."""
    explanation: str
    """What is run and how its numbers are defined, in a few sentences."""
    full: Size
    quick: Size

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Return the runs to make, in this order, by names of the experiment's own."""

    def rows(self, traces: Traces) -> list[Row]:
        """Return what was measured: the lines of the CSV file."""

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return the lines of the table in the report."""

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return the paper's table with ours beside it; none where the paper has no such table."""

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Return what the rows say, in sentences."""

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw the rows."""


def number(row: Row, name: str) -> float:
    """Return a cell that holds a number."""
    value = row[name]
    assert isinstance(value, int | float), f"{name} of {dict(row)} is no number"
    return float(value)


def those(rows: Sequence[Row], **wanted: Cell) -> list[Row]:
    """Return the rows that have these cells."""
    return [row for row in rows if all(row[name] == cell for name, cell in wanted.items())]


def column(rows: Sequence[Row], name: str) -> list[float]:
    """Return the numbers of a column."""
    return [number(row, name) for row in rows]


def distinct(rows: Sequence[Row], name: str) -> list[Cell]:
    """Return the values of a column in the order of their first appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        option = name.replace("_", "-")
        raise ValueError(f"--{option} must be {wanted}, got {value}")
