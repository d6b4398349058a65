"""Write a run directory while its writers die. Layer: files.

Theory of operation
-------------------
Every replica holds a :class:`RecordWriter` and tells it what was committed, but only the lowest
survivor writes. It does so at once, before it takes part in the verdict of the next step. So when
the next step commits and that writer is among its survivors, the lines before are on file, and the
others may forget them. When it is not, nobody knows how far it came, so everybody keeps them, and
the new lowest survivor looks at the end of the file and writes what is missing:

1. Replica 0 commits step 7 with the others and dies before (or while) it writes.
2. Replicas 1 and 2 remember step 7. They commit step 8 without replica 0.
3. Replica 1 is now the lowest. It removes a torn line, sees that step 6 is the last one on file,
   and writes 7 and 8. Had replica 0 finished its line, it would write 8 alone.
4. Replica 2 remembers both until step 9 commits with replica 1 among the survivors.

The lines of a step's recoveries are written before the step's own line. A line is handed to the
system in one call, so it outlives the process; it is not forced to the disk, so it may not outlive
the machine.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Generic

import yaml

from recover.errors import RecoverError
from recover.records.reader import CONFIG, EVENTS, STEPS
from recover.records.schema import EventRecord, Record, StepRecord, from_json, to_json

Key = tuple[int, int]
"""What orders the lines of a file: step and epoch of a recovery, step alone (and 0) of a step."""


def config_text(config: Mapping[str, object]) -> str:
    """Return settings as YAML; raises ValueError for a value that YAML has no plain form of."""
    try:
        return yaml.safe_dump(_plain(config), sort_keys=True, allow_unicode=True)
    except yaml.YAMLError as problem:
        raise ValueError(f"config holds something that is not plain data: {problem}") from None


def write_config(directory: Path, config: Mapping[str, object]) -> None:
    """Write ``config.yaml``, whole or not at all, unless it is there.

    Whichever survivor is the lowest calls it, so a writer that dies leaves it to the next one.
    Raises RecoverError where the directory cannot be written.
    """
    file = directory / CONFIG
    partial = directory / f".{CONFIG}.{os.getpid()}"
    try:
        if not file.exists():
            partial.write_text(config_text(config), encoding="utf-8")
            partial.replace(file)
    except OSError as error:
        raise RecoverError(f"cannot write to {directory}: {error.strerror}") from None


def _plain(value: object) -> object:
    """Return a setting as YAML's plain values: names for enums, texts for paths."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, StrEnum | PurePath):
        return str(value)
    return value


class RecordWriter:
    """One replica's part in writing the records of a run."""

    def __init__(self, directory: Path, replica: int) -> None:
        self._replica = replica
        self._steps = _Journal(directory / STEPS, StepRecord, lambda r: (r.step, 0))
        self._events = _Journal(directory / EVENTS, EventRecord, lambda r: (r.step, r.epoch))
        self._kept_steps: list[StepRecord] = []
        self._kept_events: list[EventRecord] = []
        self._writer: int | None = None
        """Replica that writes what is kept."""

    def commit(
        self, record: StepRecord, survivors: Sequence[int], events: Sequence[EventRecord] = ()
    ) -> None:
        """Take over a committed step and its recoveries.

        To be called right after the commit, before this rank votes on the next step. On return the
        lines are on file if this replica is the lowest survivor. Raises RecoverError where the
        file cannot be written, or was written by somebody else.
        """
        self._forget_what_is_on_file(survivors)
        self._kept_steps.append(record)
        self._kept_events.extend(events)
        self._hand_over(survivors)

    def flush_final(self, survivors: Sequence[int], events: Sequence[EventRecord] = ()) -> None:
        """See to it that nothing is lost at the end, once the survivors agreed that all is done.

        ``events`` are recoveries after the last commit. May be called again when that agreement
        had to be repeated with fewer survivors.
        """
        self._forget_what_is_on_file(survivors)
        self._kept_events.extend(events)
        self._hand_over(survivors)

    def close(self) -> None:
        """Close the files; nothing is written any more."""
        self._steps.close()
        self._events.close()

    def _forget_what_is_on_file(self, survivors: Sequence[int]) -> None:
        if self._writer in survivors:
            self._kept_steps.clear()
            self._kept_events.clear()

    def _hand_over(self, survivors: Sequence[int]) -> None:
        """Let the lowest survivor be the writer; write if that is this replica."""
        takes_over = self._writer is None or self._writer != min(survivors)
        self._writer = min(survivors)
        if self._writer != self._replica:
            return
        if takes_over:
            self._steps.take_over()
            self._events.take_over()
            self._require_own_run()
        self._events.append(self._kept_events)
        self._steps.append(self._kept_steps)

    def _require_own_run(self) -> None:
        """Refuse to go on in the files of another run.

        Replica 0 writes before anybody else, so it must find nothing of these steps; for others,
        no line can be ahead of what was agreed.
        """
        last = self._steps.last
        if last is None or not self._kept_steps:
            return
        kept = self._kept_steps
        end = kept[0].step if self._replica == 0 else kept[-1].step + 1
        if last[0] >= end:
            raise RecoverError(
                f"{self._steps.path} already has step {last[0]}, replica {self._replica} is about "
                f"to write step {kept[-1].step}: the directory holds another run, or "
                "the job went on without this replica"
            )


class _Journal(Generic[Record]):
    """A file of lines with ascending keys that one process after another appends to."""

    def __init__(self, path: Path, kind: type[Record], key: Callable[[Record], Key]) -> None:
        self.path = path
        self.last: Key | None = None
        """Key of the last line, once this process has taken over."""
        self._kind: type[Record] = kind
        self._key: Callable[[Record], Key] = key
        self._file: int | None = None
        self._size = 0
        """Bytes in the file as this process knows it."""

    def take_over(self) -> None:
        """Open the file, cut off a torn last line, and see how far it goes."""
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o644)
            line, self._size = _last_line(self._file)
            if self._size < os.fstat(self._file).st_size:
                os.ftruncate(self._file, self._size)
        except OSError as error:
            raise RecoverError(f"cannot write to {self.path}: {error.strerror}") from None
        if not line:
            return
        try:
            self.last = self._key(from_json(self._kind, line))
        except ValueError as error:
            raise RecoverError(f"{self.path}: the last line is broken: {error}") from None

    def append(self, records: Sequence[Record]) -> None:
        """Write the records that are not on file yet."""
        fresh = [r for r in records if self.last is None or self._key(r) > self.last]
        if not fresh:
            return
        assert self._file is not None, "only the replica that took over appends"
        try:
            self._require_unchanged(os.fstat(self._file).st_size)
            for record in fresh:
                line = f"{to_json(record)}\n".encode()
                _write(self._file, line)
                self._size += len(line)
                self.last = self._key(record)
        except OSError as error:
            raise RecoverError(f"cannot write to {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _require_unchanged(self, size: int) -> None:
        """Refuse to write after somebody else: the lowest survivor stays so until it dies."""
        if size != self._size:
            raise RecoverError(
                f"{self.path} was written by somebody else ({size} bytes instead of {self._size}): "
                "the job went on without this replica, or the file was edited"
            )


def _write(file: int, line: bytes) -> None:
    """Write all of ``line``; one call is enough unless the disk fills up."""
    while line:
        line = line[os.write(file, line) :]


def _last_line(file: int) -> tuple[bytes, int]:
    """Return the last whole line (empty where there is none) and the offset at which it ends."""
    size = os.fstat(file).st_size
    block = 1 << 16
    while True:
        start = max(0, size - block)
        tail = os.pread(file, size - start, start)
        end = tail.rfind(b"\n") + 1
        begin = tail.rfind(b"\n", 0, max(0, end - 1)) + 1
        if start == 0 or begin > 0:
            return tail[begin:end], start + end
        block *= 2
