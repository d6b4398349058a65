"""The mpirun command line and its environment. Layer: launch.

The one place that knows the flags. What each is for, and what happens without it, is written next
to it; ``docs/mpi.md`` has the measurements. The user's script and its arguments are not on the
command line, because mpirun takes some of them for its own (``--help``, ``:``): the ranks read them
from ``launch.json``.
"""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from recover.launch import layout

_OF_ANOTHER_LAUNCH = ("OMPI_", "PMIX_", "PRTE_")
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")


def mpirun_command(*, mpirun: Path, python: str, ranks: int, control: Path) -> list[str]:
    """Return the command that starts ``ranks`` bootstraps on this machine, under a keeper."""
    # -P: a file json.py in the working directory must not replace the library's.
    module = (python, "-P", "-m")
    return [
        *(*module, "recover.launch.keeper", str(control)),
        str(mpirun),
        # ULFM. Without it an agreement is silently a plain all-reduce.
        *("--with-ft", "ulfm"),
        # A finalize that waits for dead peers hangs.
        *("--mca", "async_mpi_finalize", "1"),
        # Collectives that swallow the death of a peer, or hang after it.
        *("--mca", "coll", "^han,adapt,sm,hcoll,portals4"),
        # More ranks than cores: who waits must let the others run. No binding for the same reason.
        *("--mca", "mpi_yield_when_idle", "1"),
        "--oversubscribe",
        *("--bind-to", "none"),
        # The rank reports a crash itself (faulthandler).
        *("--mca", "opal_stacktrace_output", "none"),
        # Everything that Open MPI would leave behind goes where we remove it.
        *("--mca", "btl_sm_backing_directory", str(control)),
        *("--prtemca", "prte_tmpdir_base", str(control)),
        # Inside a batch job: this machine, not the nodes of the allocation.
        *("--prtemca", "ras", "^slurm,pbs,lsf,gridengine"),
        *("--prtemca", "plm", "ssh"),
        *("--stdin", "none"),
        *("-n", str(ranks)),
        *(*module, "recover.launch.bootstrap"),
    ]


def environment(
    inherited: Mapping[str, str], *, control: Path, threads: int, home: str
) -> dict[str, str]:
    """Return the environment of mpirun, and so of its ranks, from the launcher's own."""
    nested = "OMPI_COMM_WORLD_RANK" in inherited  # then the settings are the outer mpirun's too
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(_OF_ANOTHER_LAUNCH) or (name.startswith(_SETTINGS) and not nested)
    }
    defaults = {
        "PATH": os.defpath,  # Open MPI searches for ssh and gives up without a PATH
        "HOME": home,
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",  # one machine; gloo would ask for the address of its name
    }
    ours = {
        layout.LAUNCH_VARIABLE: str(layout.launch_file(control)),
        "TMPDIR": str(control),  # the bootstrap gives the user's back
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    path = [*_own_source_tree(), *filter(None, [kept.get("PYTHONPATH")])]
    if path:
        ours["PYTHONPATH"] = os.pathsep.join(path)
    return defaults | kept | ours


def find_mpirun() -> Path | None:
    """Return the mpirun that belongs to this Python, else the one on the PATH, else None."""
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    candidates = [Path(sysconfig.get_path("scripts", scheme)) / "mpirun" for scheme in schemes]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    on_path = shutil.which("mpirun")
    return None if on_path is None else Path(on_path)


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return how many threads each rank's arithmetic may use."""
    return max(1, cores // ranks)


def available_cores() -> int:
    """Return the cores that this process may use: its affinity, and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _own_source_tree() -> list[str]:
    """Return where the ranks find this package, unless it is installed in their environment."""
    here = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return [] if here in installed else [str(here)]
