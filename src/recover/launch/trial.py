"""A job of two ranks of which one dies: what ``recover doctor`` runs. Layer: launch."""

import os
import signal

from recover.launch import rank


def main() -> None:
    """Let rank 1 die; the others agree on the end without it."""
    me = rank.context()
    assert me is not None, "`recover doctor` runs this"
    if me.world_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
