"""Names of the files in a control directory and in a run directory. Layer: launch.

The control directory is the short-lived meeting place of the launcher and its ranks; the run
directory is what the user keeps.
"""

from pathlib import Path

LAUNCH_VARIABLE = "RECOVER_LAUNCH"
"""The one environment variable of ours: the path of ``launch.json``. Every process of a job has
it, so it is also how a job's processes are found again, whoever their parent has become."""


def launch_file(control: Path) -> Path:
    """What the launcher tells the ranks (JSON)."""
    return control / "launch.json"


def board_file(control: Path) -> Path:
    """Where the ranks show their progress (:mod:`recover.launch.board`)."""
    return control / "board"


def pid_file(control: Path, world_rank: int) -> Path:
    """A rank's process id (text)."""
    return control / f"rank-{world_rank}.pid"


def end_file(control: Path, world_rank: int) -> Path:
    """How a rank ended, in its own words (:class:`recover.launch.note.EndNote`)."""
    return control / f"rank-{world_rank}.end"


def store_file(control: Path, replica: int) -> Path:
    """Where the store of a replica's own torch world listens: a port of the loopback (text)."""
    return control / f"replica-{replica}.port"


def crash_file(control: Path, world_rank: int) -> Path:
    """What Python says when a fatal signal hits a rank (text; empty while all is well)."""
    return control / f"rank-{world_rank}.crash"


def logs(out: Path) -> Path:
    """The directory of the logs."""
    return out / "logs"


def rank_log(out: Path, world_rank: int) -> Path:
    """All that a rank printed."""
    return logs(out) / f"rank-{world_rank}.log"


def mpirun_log(out: Path) -> Path:
    """All that mpirun printed, and what ranks printed before they had their own log."""
    return logs(out) / "mpirun.log"


def steps_file(out: Path) -> Path:
    """One line per committed step."""
    return out / "steps.jsonl"


def events_file(out: Path) -> Path:
    """One line per recovery."""
    return out / "events.jsonl"


def holds_a_run(out: Path) -> bool:
    """Whether ``out`` holds the records of an earlier run (logs alone are no run)."""
    return any(
        path.is_file() and path.stat().st_size > 0 for path in (steps_file(out), events_file(out))
    )
