"""Launch small scripts as real jobs, and look for what they leave behind."""

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recover.launch import LaunchSpec, Outcome, Timeouts, launch

MARK = "RECOVER_TEST_MARK"
SHORT = Timeouts(
    start_s=20,
    join_s=20,
    stopped_s=1,
    wait_s=5,
    hang_s=5,
    stall_s=60,
    stop_grace_s=2,
    exit_grace_s=2,
)


@dataclass
class Told:
    """A display that keeps what it is told."""

    lines: list[str] = field(default_factory=list)
    steps: list[Mapping[str, object]] = field(default_factory=list)
    events: list[Mapping[str, object]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def on_line(self, text: str) -> None:
        self.lines.append(text)

    def on_step(self, record: Mapping[str, object]) -> None:
        self.steps.append(record)

    def on_event(self, record: Mapping[str, object]) -> None:
        self.events.append(record)

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def on_end(self, outcome: Outcome) -> None:
        pass


@dataclass
class Run:
    """A job that is over."""

    outcome: Outcome
    told: Told
    out: Path

    @property
    def reasons(self) -> dict[int, str]:
        """Why each rank that did not finish ended."""
        return {end.world_rank: end.reason for end in self.outcome.ends}

    def log(self, world_rank: int) -> str:
        """Return what a rank printed."""
        return (self.out / f"logs/rank-{world_rank}.log").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    assert processes_of(tmp_path) == []
    assert control_directories_of(tmp_path) == []


def processes_of(tmp_path: Path) -> list[int]:
    """Return the processes that a test has started and that still run."""
    mark = f"{MARK}={tmp_path}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:
                continue
            if mark in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def control_directories_of(tmp_path: Path) -> list[Path]:
    """Return the control directories that belong to a test's jobs."""
    found = []
    for parent in (Path("/dev/shm"), Path("/tmp")):
        for description in parent.glob("rcv*/launch.json"):
            try:
                told = json.loads(description.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # another job's, just being made or removed
                continue
            if Path(told["out"]).is_relative_to(tmp_path):
                found.append(description.parent)
    return found


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[..., Path]:
    """Write a script and return its path."""

    def write(source: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return path

    return write


@pytest.fixture
def run_job(tmp_path: Path, write_script: Callable[..., Path]) -> Callable[..., Run]:
    """Run a script as a job to its end."""

    def run(
        source: str,
        *args: str,
        replicas: int = 1,
        name: str = "script.py",
        timeouts: Timeouts = SHORT,
    ) -> Run:
        told, out = Told(), tmp_path / "run"
        script = write_script(source, name)
        spec = LaunchSpec(script=script, out=out, args=args, replicas=replicas, timeouts=timeouts)
        return Run(launch(spec, told), told, out)

    return run
