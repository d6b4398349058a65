"""Processes as Linux shows them: state, kinship, and how to end them. Layer: launch."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recover.launch import layout

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_LIBC = ctypes.CDLL(None, use_errno=True)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process at one moment."""

    stopped: bool
    """Stopped by a signal (not by a debugger)."""
    cpu_s: float
    """Processor time that it has used so far."""
    born: int
    """With the process id, names a process for good."""


def look(pid: int) -> ProcessState | None:
    """Return the state of a process, or None where it is gone (a zombie is gone)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    if fields[0] in "ZX":
        return None
    cpu_ticks = int(fields[11]) + int(fields[12])
    return ProcessState(fields[0] == "T", cpu_ticks / _TICKS_PER_S, int(fields[19]))


def die_with_parent() -> None:
    """Have this process SIGKILLed when its parent dies; not inherited by its own children."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_name(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show, 15 characters at most."""
    _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def job_processes(control: Path, world_rank: int | None = None) -> Iterator[int]:
    """Find the processes of a job, or of one of its ranks, by the environment they started with.

    Finds what a walk over children would miss: processes whose parent has died.
    """
    marks = {f"{layout.LAUNCH_VARIABLE}={layout.launch_file(control)}".encode()}
    if world_rank is not None:
        marks.add(f"OMPI_COMM_WORLD_RANK={world_rank}".encode())
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if marks <= set(environment.split(b"\0")):
            yield int(entry.name)


def kill_job(control: Path, world_rank: int | None = None, deadline_s: float = 5.0) -> bool:
    """Kill every process of a job, or of one of its ranks; return whether all are gone.

    Goes round until none is found, because a process may fork while we look.
    """
    give_up_at = time.monotonic() + deadline_s
    while time.monotonic() < give_up_at:
        found = [pid for pid in job_processes(control, world_rank) if look(pid) is not None]
        if not found:
            return True
        for pid in found:
            send(pid, signal.SIGKILL)
        time.sleep(0.01)
    return False


def send(pid: int, signal_number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)
