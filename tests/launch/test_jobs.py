"""Real jobs: how ranks end, and what the launcher makes of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import SHORT, Run

RunJob = Callable[..., Run]


def test_a_script_runs_as_python_would_run_it(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory with spaces, with a long TMPDIR, no HOME, and arguments that mpirun takes."""
    long = tmp_path / ("x" * 200)
    long.mkdir()
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "beside.py").write_text("HERE = True")
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    arguments = ["--help", ":", "", "it's", "-n"]
    run = run_job(
        """
        import json, os, sys, tempfile, beside
        seen = {"argv": sys.argv, "tmp": tempfile.gettempdir(), "name": __name__,
                "threads": int(os.environ["OMP_NUM_THREADS"]), "path": sys.path[0]}
        print("seen", json.dumps(seen))
        """,
        *arguments,
        replicas=2,
        name="a b/my script.py",
    )
    assert run.outcome.status == 0
    assert run.outcome.finished == (0, 1)
    assert run.outcome.summary == "finished on all 2 ranks"
    (line,) = run.told.lines  # of the lowest rank alone
    script = tmp_path / "a b/my script.py"
    seen = json.loads(line.removeprefix("seen "))
    assert seen.pop("threads") >= 1
    assert seen == {
        "argv": [str(script), *arguments],
        "tmp": str(long),
        "name": "__main__",
        "path": str(script.parent),
    }
    assert list(long.iterdir()) == []


def test_every_exit_of_a_failing_rank_is_a_death_that_others_survive(run_job: RunJob) -> None:
    run = run_job(
        """
        import ctypes, os, signal, sys
        from recover.launch import rank
        child = os.fork()
        if child == 0:
            os._exit(7)  # a child's exit keeps its meaning
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        match rank.context().world_rank:
            case 1: raise ValueError("no such value\\nand more")
            case 2: sys.exit(3)
            case 3: sys.exit("no text to train on")
            case 4: os._exit(1)
            case 5: os.abort()
            case 6: ctypes.CDLL(None).exit(5)
            case 7: os.kill(os.getpid(), signal.SIGTERM)
            case 8: os.kill(os.getpid(), signal.SIGKILL)
            case 9: ctypes.string_at(0)
        print("here")
        """,
        replicas=10,
    )
    assert run.outcome.status == 0
    assert run.outcome.finished == (0,)
    assert run.reasons == {
        1: "ValueError: no such value (script.py:9)",
        2: "sys.exit(3) (script.py:10)",
        3: "the script gave up: no text to train on",
        4: "os._exit(1) (script.py:12)",
        5: "os.abort() (script.py:13)",
        6: "exit(5) in a library",
        7: "SIGTERM",
        8: "died without a word (killed from outside, out of memory, or a crash)",
        9: "crashed: Segmentation fault",
    }
    assert "and more" in run.log(1)
    assert "Traceback" in run.log(1)
    assert "bootstrap.py" not in run.log(1)
    assert "Fatal Python error" in run.log(9)


def test_an_exception_on_all_ranks_is_told_once(run_job: RunJob) -> None:
    run = run_job("print('starting')\nimport no_such_module\n", replicas=3)
    assert run.outcome.status == 1
    assert run.outcome.block().splitlines() == [
        "recover: the job did not finish: no replica is left",
        "  replicas 0-2: ModuleNotFoundError: No module named 'no_such_module' (script.py:2)",
        f"    log: {run.out}/logs/rank-0.log",
    ]
    assert run.told.lines == ["starting"]  # the traceback stays in the log


def test_a_script_that_leaves_its_training_did_not_finish(run_job: RunJob) -> None:
    run = run_job(
        """
        import sys
        from recover.launch import rank
        rank.board().progress(step=4, until=9)
        sys.exit(0)
        """,
        replicas=2,
    )
    assert run.outcome.status == 1
    assert "before the training did (step 4 of 9)" in run.outcome.problem
    assert set(run.reasons.values()) == {"the script ended at step 4 of 9"}


def test_a_script_that_fails_after_its_training_fails(run_job: RunJob) -> None:
    run = run_job(
        """
        from recover.launch import rank
        rank.note_end("finished", "parameters are equal")
        if rank.context().world_rank == 0:
            raise OSError("disk full")
        """,
        replicas=2,
    )
    assert run.outcome.status == 1
    assert run.outcome.finished == (0, 1)
    assert run.reasons == {0: "OSError: disk full (script.py:5)"}


def test_a_finished_rank_may_leave_by_itself_and_its_children_go_with_it(run_job: RunJob) -> None:
    run = run_job(
        """
        import os, subprocess
        from recover.launch import rank
        subprocess.Popen(["sleep", "300"])
        rank.note_end("finished", "done")
        os._exit(0)
        """
    )
    assert run.outcome.status == 0


def test_a_rank_that_stays_after_its_last_word_is_reaped(run_job: RunJob) -> None:
    run = run_job(
        """
        import time
        from recover.launch import board, rank
        rank.note_end("finished", "done")
        rank.board().beat(board.EXIT)
        time.sleep(300)
        """
    )
    assert run.outcome.status == 0


def test_records_and_the_log_of_the_lowest_living_rank_are_relayed(run_job: RunJob) -> None:
    run = run_job(
        """
        import os, signal, time
        from recover.launch import layout, rank
        me = rank.context()
        print("rank", me.world_rank, flush=True)
        if me.world_rank == 0:
            layout.steps_file(me.out).write_text('{"step": 0}\\n{"step": 1}\\n{"trunc')
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        layout.events_file(me.out).write_text('{"step": 1, "replicas": [0]}\\n')
        print("rank 1 goes on")
        """,
        replicas=2,
    )
    assert run.outcome.status == 0
    assert run.told.lines[0] == "rank 0"
    assert run.told.lines[-1] == "rank 1 goes on"
    assert run.told.steps == [{"step": 0}, {"step": 1}]
    assert run.told.events == [{"step": 1, "replicas": [0]}]


# --- hangs -------------------------------------------------------------------------------------


def test_a_stopped_rank_dies(run_job: RunJob) -> None:
    run = run_job(
        """
        import os, signal
        from recover.launch import rank
        if rank.context().world_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
        replicas=2,
    )
    assert run.outcome.status == 0
    assert run.reasons == {1: "stopped (SIGSTOP) for 1 s"}
    assert run.told.notices == ["replica 1 is ended by the launcher: stopped (SIGSTOP) for 1 s"]


def test_a_silent_rank_that_keeps_others_waiting_dies(run_job: RunJob) -> None:
    run = run_job(
        """
        import time
        from recover.launch import rank
        from recover.mpi import transport
        if rank.context().world_rank == 1:
            rank.board().beat("backward")
            time.sleep(300)
        rank.board().beat("collective agree")
        assert not transport.current().agree(True)
        transport.current().shrink()
        """,
        replicas=2,
    )
    assert run.outcome.status == 0
    assert run.reasons == {1: "no progress for 5 s in phase 'backward', idle, while others waited"}


# --- starts that fail --------------------------------------------------------------------------


def test_ranks_that_cannot_join_mpi_are_one_error(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    run = run_job("", replicas=2)
    assert run.outcome.status == 1
    assert "before it had joined" in run.outcome.problem
    assert all("cannot join MPI" in reason for reason in run.reasons.values())


def test_a_python_that_cannot_start_is_one_error(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    run = run_job("", replicas=2)
    assert run.outcome.status == 1
    assert "before it had joined" in run.outcome.problem
    assert any("Python" in line for line in run.outcome.details)


def test_a_rank_that_does_not_start_has_a_deadline(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('OMPI_COMM_WORLD_RANK') == '1': time.sleep(300)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    timeouts = type(SHORT)(start_s=2)
    run = run_job("", replicas=2, timeouts=timeouts)
    assert run.outcome.status == 1
    assert run.outcome.problem == "ranks [1] did not start within 2 s"


def test_the_death_of_mpirun_is_one_error(run_job: RunJob) -> None:
    run = run_job("import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(300)")
    assert run.outcome.status == 1
    assert run.outcome.problem


def test_logs_of_a_run_that_came_to_nothing_are_replaced(run_job: RunJob) -> None:
    assert run_job("raise ValueError(1)").outcome.status == 1
    run = run_job("print('better')")
    assert run.outcome.status == 0
    assert run.log(0) == "better\n"
    assert os.listdir(run.out) == ["logs"]
