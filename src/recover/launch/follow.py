"""Follow growing files: the records and the log of the lowest living rank. Layer: launch."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from recover.launch import layout, note

_CHUNK_BYTES = 1 << 20
_NOISE = "NBC_Progress: an error"
"""Open MPI prints this, and an empty line, on every survivor of a failure."""


class Tail:
    """The lines that were added to a file since the last look."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._rest = b""
        self.offset = offset

    def lines(self, limit: Callable[[], int | None] = lambda: None) -> list[str]:
        """Return the new complete lines; ``limit``, asked after reading, cuts off what follows."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                chunk = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return []
        end = limit()
        if end is not None:
            chunk = chunk[: max(0, end - self.offset)]
        self.offset += len(chunk)
        *complete, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode(errors="replace") for line in complete]

    def rest(self) -> list[str]:
        """Return the last line, if it was never completed."""
        return [self._rest.decode(errors="replace")] if self._rest else []


def records(tail: Tail) -> Iterator[dict[str, object]]:
    """Parse the new lines of a file of JSON lines; a line that is none is passed over."""
    for line in tail.lines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _without_noise(lines: Iterable[str]) -> Iterator[str]:
    """Drop what Open MPI prints on the survivors of a failure."""
    after_noise = False
    for line in lines:
        noise = line.startswith(_NOISE)
        if not noise and not (after_noise and not line):
            yield line
        after_noise = noise


class LogRelay:
    """The output of the lowest living rank, without the details of how it died.

    Who is lowest changes when ranks die. The new one is followed from where its log was at the last
    look, so that what it prints in its new part is not missed.
    """

    def __init__(self, *, out: Path, control: Path) -> None:
        self._out = out
        self._control = control
        self._world_rank = 0
        self._tail = Tail(layout.rank_log(out, 0))
        self._sizes: dict[int, int] = {}

    def lines(self, living: Iterable[int]) -> list[str]:
        """Return what is new, given the ranks that live."""
        ranks = sorted(living)
        lines = self._tail.lines(self._limit)
        if ranks and ranks[0] != self._world_rank:
            self._world_rank = ranks[0]
            log = layout.rank_log(self._out, self._world_rank)
            self._tail = Tail(log, self._sizes.get(self._world_rank, 0))
            lines += self._tail.lines(self._limit)
        self._sizes = {rank: _size(layout.rank_log(self._out, rank)) for rank in ranks}
        return list(_without_noise(lines))

    def rest(self) -> list[str]:
        """Return the last line, if it was never completed."""
        return self._tail.rest()

    def _limit(self) -> int | None:
        """Where the log of a rank that died of an error turns into details."""
        ended = note.read(layout.end_file(self._control, self._world_rank))
        return None if ended is None or ended.kind == note.FINISHED else ended.log_bytes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
