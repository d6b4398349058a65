"""The control directory: a private, short-lived meeting place of a launcher and its ranks.

Layer: launch. It also takes in everything that Open MPI would leave elsewhere (its session
directory, the files behind its shared memory), so that removing one directory removes all of it.
Its path is short, because Unix sockets and Open MPI's own files break on long ones, and it is in
memory where there is room.

The launcher holds a lock on the directory while it lives. The kernel drops the lock however the
launcher dies, so a directory that can be locked belongs to nobody: the next launch removes it, with
whatever still runs for it. (A process id would not do: it may be another process by then, or one
of another container.)
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from recover.launch import layout, processes

_PREFIX = "rcv-"
_UNNAMED_PREFIX = "rcvnew-"
_PARENTS = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"))
_SHARED_BYTES_PER_RANK = 32 << 20
_UNNAMED_AGE_S = 60.0


class Control:
    """A locked control directory; a context manager that removes it."""

    def __init__(self, ranks: int) -> None:
        parent = choose_parent(ranks * _SHARED_BYTES_PER_RANK)
        unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED_PREFIX, dir=parent))
        self._lock = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now does it get a name that others look for: an unlocked one is never seen.
        self.path = unnamed.with_name(unnamed.name.replace(_UNNAMED_PREFIX, _PREFIX))
        unnamed.rename(self.path)

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def describe(self, description: dict[str, object]) -> None:
        """Write down what the ranks must know."""
        text = json.dumps(description | {"control": str(self.path)}, indent=1)
        layout.launch_file(self.path).write_text(text, encoding="utf-8")


def choose_parent(needed_bytes: int) -> Path:
    """Return where to make a control directory: in memory, unless there is too little of it."""
    usable = [parent for parent in _PARENTS if os.access(parent, os.W_OK | os.X_OK)]
    if not usable:
        return Path(tempfile.gettempdir())
    roomy = (parent for parent in usable if shutil.disk_usage(parent).free >= needed_bytes)
    return next(roomy, usable[-1])


def launcher_lives(control: Path) -> bool:
    """Whether the launcher that made ``control`` still runs."""
    try:
        directory = os.open(control, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(directory)
    return False


def remove_stale() -> list[Path]:
    """Remove control directories whose launcher is gone, and kill what still runs for them."""
    removed = []
    for control in _stale():
        processes.kill_job(control)
        shutil.rmtree(control, ignore_errors=True)
        removed.append(control)
    return removed


def _stale() -> Iterator[Path]:
    for parent in _PARENTS:
        for path in (*parent.glob(f"{_PREFIX}*"), *parent.glob(f"{_UNNAMED_PREFIX}*")):
            try:
                status = path.lstat()
            except OSError:  # another launch was quicker
                continue
            fresh = time.time() - status.st_mtime < _UNNAMED_AGE_S
            if status.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
                continue
            if path.name.startswith(_UNNAMED_PREFIX) and fresh:
                continue
            if not launcher_lives(path):
                yield path
