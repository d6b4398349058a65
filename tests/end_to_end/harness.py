"""Runs the command line as a user does, with a deadline, and says how to run it again."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from recover.records import RunRecord, check_run, read_run
from tests.end_to_end import subject
from tests.end_to_end.subject import Settings

DEADLINE_S = 240.0
"""Of one run: some 30 times what it takes on a quiet machine of two cores."""
RECOVER = (sys.executable, "-c", "from recover.cli import app; app()")


@dataclass(frozen=True, slots=True)
class Run:
    """A command that has ended."""

    command: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    out: Path
    """The run directory, where the command has one."""

    @property
    def replay(self) -> str:
        """What to show with a failure: everything that was said, and how to say it again."""
        return f"\n{self.stdout}{self.stderr}\nstatus {self.status}; run it again with:\n  " + (
            shlex.join(self.command)
        )

    @property
    def record(self) -> RunRecord:
        """The run's records, which must keep the invariant and be whole."""
        record = read_run(self.out)
        assert [*record.problems, *check_run(record)] == [], self.replay
        return record

    def log(self, rank: int) -> str:
        """Return what a rank printed."""
        return (self.out / f"logs/rank-{rank}.log").read_text(encoding="utf-8")

    def finished(self) -> "Run":
        """Return the run itself, which must have reached its end."""
        assert self.status == 0, self.replay
        return self

    def checksums(self) -> dict[int, str]:
        """Return what each rank that reached the end says about its parameters."""
        found = {}
        for path in self.out.glob("logs/rank-*.log"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.startswith("recover: finished step"):
                    found[int(path.stem.removeprefix("rank-"))] = line
        return found


def recover(*arguments: object, out: Path = Path(), deadline_s: float = DEADLINE_S) -> Run:
    """Run ``recover ARGUMENTS...`` to its end; fail the test if it outlives the deadline."""
    return command(*RECOVER, *(str(a) for a in arguments), out=out, deadline_s=deadline_s)


def command(*words: str, out: Path = Path(), deadline_s: float = DEADLINE_S) -> Run:
    """Run a command to its end; fail the test if it outlives the deadline."""
    try:
        ended = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:  # the launcher is dead now, and the job with it
        said = f"{late.stdout!r}\n{late.stderr!r}"
        pytest.fail(f"still running after {deadline_s:g} s: {shlex.join(words)}\n{said}")
    return Run(words, ended.returncode, ended.stdout, ended.stderr, out)


def run_subject(
    directory: Path,
    settings: Settings,
    *,
    replicas: int,
    faults: Sequence[Mapping[str, object]] = (),
) -> Run:
    """Train the subject in ``directory``, which must not exist, under these failures."""
    kept = directory / "kept"
    kept.mkdir(parents=True)
    arguments: list[object] = ["run", "--replicas", replicas, "--out", directory / "run"]
    if faults:
        arguments += ["--faults", write_faults(directory / "faults.yaml", faults)]
    arguments += [subject.__file__, kept_in(settings, kept).to_json()]
    return recover(*arguments, out=directory / "run")


def kept_in(settings: Settings, kept: Path) -> Settings:
    """Return the settings with the directory that ranks write to."""
    values = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    return Settings(**values | {"kept": str(kept)})


def write_faults(file: Path, faults: Sequence[Mapping[str, object]]) -> Path:
    """Write a schedule by hand, not with the code that is tested."""
    lines = [
        "  - {" + ", ".join(f"{key}: {value}" for key, value in fault.items()) + "}"
        for fault in faults
    ]
    file.write_text("\n".join(["faults:", *lines, ""]), encoding="utf-8")
    return file
