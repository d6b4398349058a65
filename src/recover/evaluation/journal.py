"""What a contender's processes tell whoever started them, as JSON lines in one file.

Layer: evaluation; no torch. A line is handed to the system in one call, so lines of several
processes never mix, and what a process said before a SIGKILL is there.
"""

import json
import os
import time
from pathlib import Path

Line = dict[str, object]


class Journal:
    """One process's end of the file; ``who`` (rank, attempt, ...) is added to every line."""

    def __init__(self, path: Path, **who: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._who = who

    def write(self, kind: str, **values: object) -> None:
        """Add a line; ``time`` is now unless it is given."""
        line = {"kind": kind, "time": time.time(), **values, **self._who}
        os.write(self._file, f"{json.dumps(line)}\n".encode())

    def moment(self, name: str, step: int | None = None, **facts: float | str) -> None:
        """Say that something happened now."""
        self.write("moment", name=name, step=step, facts=facts)


class Follower:
    """Reads a file of JSON lines while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[Line]:
        """Return the complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                read = file.read()
        except FileNotFoundError:
            return []
        complete = read[: read.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def process_started() -> float:
    """Return when this process was started, in seconds since 1970, to a hundredth."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
