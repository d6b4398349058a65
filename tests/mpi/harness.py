"""Starts real ranks without the launcher: one function, on N ranks, with a deadline.

Every rank writes its result to a file of its own. Nothing is parsed from interleaved output.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (
    *("--mca", "async_mpi_finalize", "1"),
    *("--mca", "coll", "^han,adapt,sm,hcoll,portals4"),
    *("--mca", "mpi_yield_when_idle", "1"),
    *("--oversubscribe", "--bind-to", "none"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back."""

    values: dict[int, Any]
    """Return value of each rank that returned."""
    errors: dict[int, str]
    """The last line of the traceback of each rank that raised."""
    hung: bool
    """Whether the deadline passed."""
    text: str
    """All logs, for a failure message."""


def launch(
    function: str,
    ranks: int,
    arguments: dict[str, Any] | None = None,
    *,
    fault_tolerant: bool = True,
    deadline_s: float = 40.0,
) -> Outcome:
    """Run ``function`` ("module:name") on ``ranks`` ranks and collect what they leave behind."""
    with tempfile.TemporaryDirectory(prefix="rcvt-", dir="/tmp") as folder:  # sockets: short paths
        out = Path(folder)
        command = [
            str(Path(sysconfig.get_path("scripts")) / "mpirun"),
            *(("--with-ft", "ulfm") if fault_tolerant else ()),
            *RECIPE,
            *("--mca", "btl_sm_backing_directory", folder),
            *("--prtemca", "prte_tmpdir_base", folder),
            *("-n", str(ranks), sys.executable, "-m", "tests.mpi.rank_main"),
            *(function, folder, json.dumps(arguments or {})),
        ]
        with (out / "mpirun.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            hung = not _wait(process, deadline_s)
            if hung:
                _end(process, out)
        return _collect(out, hung)


def _environment() -> dict[str, str]:
    foreign = ("OMPI_", "PMIX_", "PRTE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _wait(process: "subprocess.Popen[bytes]", deadline_s: float) -> bool:
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: "subprocess.Popen[bytes]", out: Path) -> None:
    """Show where each rank stands, then kill the ranks and mpirun, each by its own id."""
    pids = [int(path.read_text()) for path in out.glob("rank-*.pid")]
    for number in (signal.SIGUSR1, signal.SIGKILL):  # rank_main dumps its stacks on SIGUSR1
        for pid in pids:
            if f"{out}".encode() in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if number == signal.SIGUSR1:
            _wait(process, 0.5)
    process.terminate()
    if not _wait(process, 5.0):
        process.kill()
        process.wait()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _collect(out: Path, hung: bool) -> Outcome:
    values, errors = {}, {}
    for rank, path in _numbered(out, "json"):
        result = json.loads(path.read_text())
        if "error" in result:
            errors[rank] = result["error"]
        else:
            values[rank] = result["value"]
    logs = [out / "mpirun.log", *(path for _, path in _numbered(out, "log"))]
    text = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')}" for p in logs if p.exists())
    return Outcome(values, errors, hung, text)


def _numbered(out: Path, suffix: str) -> Iterator[tuple[int, Path]]:
    paths = {int(path.stem.split("-")[1]): path for path in out.glob(f"rank-*.{suffix}")}
    return iter(sorted(paths.items()))
