"""Signals to the launcher itself: it ends everything, or the kernel and the keeper do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import recover

from .conftest import control_directories_of, processes_of

_LAUNCHER = """
import sys
from pathlib import Path
from recover.launch import LaunchSpec, run
sys.exit(run(LaunchSpec(script=Path(sys.argv[1]), out=Path(sys.argv[2]), replicas=2)))
"""
_DEADLINE_S = 20.0
_SLEEPER = """
import subprocess, sys, time
from recover.launch import rank
subprocess.Popen(["sleep", "300"])
(rank.context().out / f"ready-{rank.context().world_rank}").touch()
while True:
    try:
        time.sleep(300)
    except BaseException:
        pass
"""
_STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _SLEEPER


@contextmanager
def launcher(script: Path, out: Path) -> Iterator["subprocess.Popen[str]"]:
    """A launcher in a process of its own whose two ranks have come to their script."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, script, out],
        env=os.environ | {"PYTHONPATH": str(Path(recover.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in `tests &`
    )
    with process:
        try:
            until(lambda: (out / "ready-0").exists() and (out / "ready-1").exists())
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    give_up_at = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_job(
    number: signal.Signals, status: int, tmp_path: Path, write_script: Callable[..., Path]
) -> None:
    with launcher(write_script(_SLEEPER), tmp_path / "run") as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == status
    assert said == f"recover: the job did not finish: ended by {number.name}\n"


def test_a_second_signal_ends_what_does_not_listen(
    tmp_path: Path, write_script: Callable[..., Path]
) -> None:
    with launcher(write_script(_STUBBORN), tmp_path / "run") as process:
        asked_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 130
    assert time.monotonic() - asked_at < 3.0


def test_nothing_outlives_a_launcher_that_is_killed(
    tmp_path: Path, write_script: Callable[..., Path]
) -> None:
    with launcher(write_script(_SLEEPER), tmp_path / "run") as process:
        assert len(processes_of(tmp_path)) >= 5
        process.kill()
        process.communicate(timeout=_DEADLINE_S)
        until(lambda: not processes_of(tmp_path))
        until(lambda: not control_directories_of(tmp_path))


def test_what_a_killed_launcher_and_keeper_leave_is_removed_by_the_next_launch(
    tmp_path: Path, write_script: Callable[..., Path], run_job: Callable[..., object]
) -> None:
    with launcher(write_script(_SLEEPER), tmp_path / "first") as process:
        (control,) = control_directories_of(tmp_path)
        keepers = [pid for pid in processes_of(tmp_path) if b"launch.keeper" in _command(pid)]
        process.send_signal(signal.SIGSTOP)  # so that it does not end the job itself
        for pid in (*keepers, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=_DEADLINE_S)
        until(lambda: not any(b"launch.bootstrap" in _command(p) for p in processes_of(tmp_path)))
    assert control.exists()
    run_job("")
    assert not control.exists()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
