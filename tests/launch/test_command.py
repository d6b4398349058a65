"""The mpirun command line and environment, which are pure."""

import os
import sysconfig
from pathlib import Path

import pytest

import recover
from recover.launch import command

CONTROL = Path("/dev/shm/rcv-x")


def flags() -> list[str]:
    return command.mpirun_command(
        mpirun=Path("/env/bin/mpirun"), python="/env/bin/python", ranks=4, control=CONTROL
    )


def test_the_keeper_runs_mpirun_and_mpirun_the_bootstraps() -> None:
    words = flags()
    assert words[:5] == ["/env/bin/python", "-P", "-m", "recover.launch.keeper", str(CONTROL)]
    assert words[5] == "/env/bin/mpirun"
    assert words[-6:-4] == ["-n", "4"]
    assert words[-4:] == ["/env/bin/python", "-P", "-m", "recover.launch.bootstrap"]


def test_what_fault_tolerance_needs_is_asked_for() -> None:
    line = " ".join(flags())
    for wanted in (
        "--with-ft ulfm",
        "--mca async_mpi_finalize 1",
        "--mca coll ^han,adapt,sm,hcoll,portals4",
        "--mca mpi_yield_when_idle 1",
        "--oversubscribe",
        f"--mca btl_sm_backing_directory {CONTROL}",
        f"--prtemca prte_tmpdir_base {CONTROL}",
    ):
        assert wanted in line


def environment(**inherited: str) -> dict[str, str]:
    return command.environment(inherited, control=CONTROL, threads=3, home="/home/me")


def test_an_empty_environment_becomes_one_that_open_mpi_accepts() -> None:
    given = environment()
    assert given["HOME"] == "/home/me"
    assert given["PATH"] == os.defpath
    assert given["OMP_NUM_THREADS"] == "3"
    assert given["TMPDIR"] == str(CONTROL)
    assert given["RECOVER_LAUNCH"] == str(CONTROL / "launch.json")
    assert given["OMPI_ALLOW_RUN_AS_ROOT"] == given["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_the_users_choices_are_kept() -> None:
    given = environment(OMP_NUM_THREADS="7", HOME="/h", PATH="/p", OMPI_MCA_btl="self,sm", MINE="1")
    assert given["OMP_NUM_THREADS"] == "7"
    assert given["HOME"] == "/h"
    assert given["PATH"] == "/p"
    assert given["OMPI_MCA_btl"] == "self,sm"
    assert given["MINE"] == "1"


def test_what_an_outer_mpirun_said_is_dropped() -> None:
    given = environment(
        OMPI_COMM_WORLD_RANK="1", PMIX_RANK="1", PRTE_LAUNCHED="1", OMPI_MCA_mpi_ft_enable="0"
    )
    dropped = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PRTE_LAUNCHED", "OMPI_MCA_mpi_ft_enable")
    assert not set(dropped) & set(given)


def test_a_source_tree_is_put_on_the_path_of_the_ranks() -> None:
    tree = Path(recover.__file__).resolve().parents[1]
    installed = tree == Path(sysconfig.get_path("purelib")).resolve()
    given = environment(PYTHONPATH="/mine").get("PYTHONPATH", "").split(os.pathsep)
    assert given == (["/mine"] if installed else [str(tree), "/mine"])


def test_ranks_share_the_cores() -> None:
    assert command.threads_per_rank(16, 4) == 4
    assert command.threads_per_rank(2, 8) == 1
    assert 1 <= command.available_cores() <= (os.cpu_count() or 1)


def test_the_mpirun_of_this_environment_is_found_without_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    mpirun = command.find_mpirun()
    assert mpirun is not None
    assert mpirun.is_file()
