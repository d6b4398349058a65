"""What to launch, and how long to wait for what. Layer: launch.

Both values check themselves when they are made, so that a wrong command line is one sentence and
no process has been started yet.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from recover.core.mesh import Mesh
from recover.launch import layout


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of the supervision, in seconds; :mod:`recover.launch.liveness` applies them.

    The order is checked, because it keeps false alarms away: a rank that stands still is noticed
    before ranks that wait for each other, and those before a rank that keeps others waiting.
    """

    start_s: float = 120.0
    """From the start until every rank's Python runs."""
    join_s: float = 120.0
    """From then on until every rank has joined MPI."""
    stopped_s: float = 3.0
    """A rank that is stopped (SIGSTOP) for this long dies."""
    wait_s: float = 120.0
    """When all ranks wait for each other for this long, the one that is stuck longest dies."""
    hang_s: float = 600.0
    """A rank that is silent, idle and keeps others waiting for this long dies."""
    stall_s: float = 3600.0
    """A rank that is silent and either idle or keeps others waiting for this long dies."""
    stop_grace_s: float = 5.0
    """From the request to end (Ctrl-C) until what is left is killed."""
    exit_grace_s: float = 10.0
    """From a rank's last word, or the last rank's end, until what still stays is killed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name} must be a positive number of seconds, got {value}")
        if not self.stopped_s < self.wait_s <= self.hang_s <= self.stall_s:
            raise ValueError(
                "timeouts must be ordered stopped_s < wait_s <= hang_s <= stall_s, got "
                f"{self.stopped_s} / {self.wait_s} / {self.hang_s} / {self.stall_s}"
            )


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One job: the user's script on ``replicas * ranks_per_replica`` processes of this machine."""

    script: Path
    """A Python file, or a directory that holds a ``__main__.py``; may be relative."""
    out: Path
    """The run directory to create; one run each."""
    args: tuple[str, ...] = ()
    replicas: int = 1
    ranks_per_replica: int = 1
    faults: Path | None = None
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        Mesh(self.replicas, self.ranks_per_replica)  # raises a ValueError that shows the value
        if not self.script.is_file() and not (self.script / "__main__.py").is_file():
            raise ValueError(f"there is no script {str(self.script)!r}")
        if self.faults is not None and not self.faults.is_file():
            raise ValueError(f"there is no faults file {str(self.faults)!r}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"the run directory {str(self.out)!r} is a file")
        if layout.holds_a_run(self.out):
            raise ValueError(
                f"the run directory {str(self.out)!r} already holds a run; name another one or "
                "remove it"
            )

    @property
    def mesh(self) -> Mesh:
        """The job at its start."""
        return Mesh(self.replicas, self.ranks_per_replica)
