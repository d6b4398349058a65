"""The process between the launcher and mpirun: what makes a job die with its launcher.

Layer: launch. ``python -m recover.launch.keeper CONTROL COMMAND...`` runs the command and ends with
its status. Its standard input is a pipe of which only the launcher holds the other end. Who ends
whom, whatever is SIGKILLed:

- the launcher: the pipe closes, the keeper ends every process of the job and removes the control
  directory;
- the keeper: the kernel ends mpirun, and with it its ranks;
- mpirun: the kernel ends the ranks, and the launcher sees them gone;
- launcher and keeper at once: the kernel ends mpirun and the ranks; the next launch removes what
  they leave (:func:`recover.launch.control.remove_stale`).
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from recover.launch import processes


def main() -> int:
    """Keep one job; return the status of the command."""
    control, *command = sys.argv[1:]
    wakes, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the select below
    # Code between fork and exec is safe here: this process has one thread.
    mpirun = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=processes.die_with_parent
    )
    while mpirun.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wakes], [], [])
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
            processes.kill_job(Path(control))
            shutil.rmtree(control, ignore_errors=True)
            return 128 + signal.SIGKILL
        if wakes in ready:
            wakes.recv(64)
    return mpirun.returncode if mpirun.returncode >= 0 else 128 - mpirun.returncode


if __name__ == "__main__":
    sys.exit(main())
