"""The first code of every rank: ``python -m recover.launch.bootstrap``. Layer: launch.

Redirects the output, joins MPI *before* the user's script runs (so that every later death is one
that the survivors recover from), runs the script as Python itself would, and turns every way to
fail into a death by signal with a noted reason. See :mod:`recover.launch.rank` for why.
"""

import atexit
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from recover.errors import RecoverError
from recover.launch import board as phases
from recover.launch import control, layout, note, processes, rank, unit

_OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


def main() -> NoReturn:
    """Be a rank of the job that the launcher described."""
    processes.die_with_parent()
    me = rank.context()
    if me is None:
        raise SystemExit("recover.launch.bootstrap is started by `recover run`, not by hand")
    if not control.launcher_lives(me.control):  # it died before die_with_parent took effect
        os.kill(os.getpid(), signal.SIGKILL)
    keep_alive = guard_exits()
    try:
        _prepare(me)
        told = rank.launch_description()
        run_script(str(told["script"]), _words(told["args"]))
        finish(me)
    except BaseException as error:
        rank.die(note.FAILED, _reason(error, ""), traceback.format_exc())
    finally:
        del keep_alive


# --- before the script -----------------------------------------------------------------------


def _prepare(me: rank.RankContext) -> None:
    processes.set_name(f"recover-{me.world_rank}")
    _redirect_output(layout.rank_log(me.out, me.world_rank))
    layout.pid_file(me.control, me.world_rank).write_text(str(os.getpid()), encoding="ascii")
    _beat(phases.JOIN)
    _join(me)
    crash_file = layout.crash_file(me.control, me.world_rank)
    faulthandler.enable(crash_file.open("w"))  # after MPI, whose own handlers say less
    _restore_temporary_directory()
    unit.watch(me)
    _beat(phases.SCRIPT)


def _redirect_output(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):  # whole lines: a SIGKILL must not eat the last words
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )


def _join(me: rank.RankContext) -> None:
    try:
        from recover.mpi import transport  # here: it loads MPI

        transport.join(me.mesh)
    except RecoverError as error:
        rank.die(note.FAILED, str(error), traceback.format_exc())
    except Exception as error:
        reason = f"cannot join MPI: {type(error).__name__}: {error}; `recover doctor` tells more"
        rank.die(note.FAILED, reason, traceback.format_exc())


def _restore_temporary_directory() -> None:
    """Give the script the user's TMPDIR; the launcher had set a short one for Open MPI."""
    told = rank.launch_description()["tmpdir"]
    os.environ.pop("TMPDIR", None)
    if told is not None:
        os.environ["TMPDIR"] = str(told)
    tempfile.tempdir = None  # forget what was derived from the other


# --- the script ------------------------------------------------------------------------------


def run_script(script: str, args: list[str]) -> None:
    """Run ``script`` as ``python script args...`` would; return where it ended without an error."""
    sys.argv[:] = [script, *args]
    if os.path.isfile(script):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except RecoverError as error:  # before SystemExit: some are both
        unit.await_verdict()
        rank.die(note.FAILED, str(error), _details(error))
    except SystemExit as error:
        _system_exit(error, script)
    except BaseException as error:
        unit.await_verdict()
        rank.die(note.FAILED, _reason(error, script), _details(error))


def _system_exit(error: SystemExit, script: str) -> None:
    if error.code is None or error.code == 0:
        return
    if isinstance(error.code, int):
        reason = f"sys.exit({error.code}){_where(error, script)}"
    else:
        reason = f"the script gave up: {error.code}"
    rank.die(note.FAILED, reason)


def _reason(error: BaseException, script: str) -> str:
    said = rank.one_line(str(error))
    return f"{type(error).__name__}{': ' + said if said else ''}{_where(error, script)}"


def _where(error: BaseException, script: str) -> str:
    """Name the line that matters to the user: the last one of the script itself."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script]
    return f" ({os.path.basename(script)}:{own[-1].lineno})" if own else ""


def _details(error: BaseException) -> str:
    """Format the traceback as it would look without the bootstrap."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


# --- the end ---------------------------------------------------------------------------------


def finish(me: rank.RankContext) -> NoReturn:
    """End after the script returned: as finished, or as one that left the job too early."""
    # As Python does at its end: pools are told to stop, then threads are waited for, since one may
    # still be writing a checkpoint. Joining them by hand would wait for idle pools for ever.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if note.read(layout.end_file(me.control, me.world_rank)) is None:
        reading = _slot().read()
        if reading.until:
            rank.die(note.LEFT, f"the script ended at step {reading.step} of {reading.until}")
        _beat(phases.FINISH)
        _agree_on_the_end()
        rank.note_end(note.FINISHED, "the script returned")
    leave()


def leave() -> NoReturn:
    """End with status 0, without MPI_Finalize: it can hang once somebody has died."""
    rank.flush()
    _beat(phases.EXIT)
    _exit_process(0)


def _agree_on_the_end() -> None:
    """Wait until every surviving rank has come here."""
    from recover.mpi import transport

    here = transport.current()
    if here is None:
        return
    while not here.agree(True):  # ends: every round that fails has lost a rank
        here.shrink()


# --- ways to fail ----------------------------------------------------------------------------

_exit_process = os._exit
_abort_process = os.abort
_OnExit = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)


def guard_exits() -> object:
    """Turn SIGTERM, ``os._exit``, ``os.abort`` and C's ``exit`` in this process into a death.

    Its forked children keep the meaning that these have for them. Returns what must stay referenced
    while the process lives.
    """
    rank_pid = os.getpid()

    def terminate(signal_number: int, _: FrameType | None) -> None:
        if os.getpid() == rank_pid:
            rank.die(note.FAILED, signal.Signals(signal_number).name)
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)

    def exit_process(status: int) -> NoReturn:
        if os.getpid() != rank_pid:
            _exit_process(status)
        _exit_of_rank(status, _caller(sys._getframe(1)))

    def abort() -> NoReturn:
        if os.getpid() != rank_pid:
            _abort_process()
        rank.die(note.FAILED, f"os.abort(){_caller(sys._getframe(1))}")

    def exit_of_library(status: int, _: object) -> None:
        if os.getpid() == rank_pid:
            rank.die(note.FAILED, f"exit({status}) in a library")

    signal.signal(signal.SIGTERM, terminate)
    os._exit = exit_process
    os.abort = abort
    callback = _OnExit(exit_of_library)
    ctypes.CDLL(None).on_exit(callback, None)
    return callback


def _exit_of_rank(status: int, where: str) -> NoReturn:
    me = rank.context()
    assert me is not None, "a rank runs this"
    ended = note.read(layout.end_file(me.control, me.world_rank))
    if status == 0 and ended is not None and ended.finished:
        leave()
    rank.die(note.LEFT if status == 0 else note.FAILED, f"os._exit({status}){where}")


def _caller(frame: FrameType) -> str:
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _words(value: object) -> list[str]:
    assert isinstance(value, list), f"the launcher wrote {value!r}"
    return [str(word) for word in value]


def _slot() -> phases.Board:
    slot = rank.board()
    assert slot is not None, "a rank runs this"
    return slot


def _beat(phase: str) -> None:
    _slot().beat(phase)


if __name__ == "__main__":
    main()
