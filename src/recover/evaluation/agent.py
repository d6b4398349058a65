"""Becomes a command that dies with the process that started it. Layer: evaluation.

    python -m recover.evaluation.agent PARENT COMMAND...

So nothing of a contender stays, even where whoever runs the evaluation is killed by SIGKILL.
"""

import os
import sys

from recover.launch import processes


def main() -> None:
    """Ask the kernel for it, and replace this process by the command."""
    parent, *command = sys.argv[1:]
    processes.die_with_parent()
    if os.getppid() == int(parent):  # else it died before we asked
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
