"""Where microbatches come from: anything addressed by index, or an endless stream. Layer: train."""

from collections.abc import Iterable, Iterator, Sized
from typing import Protocol, TypeVar, runtime_checkable

from recover.core.data import DataLedger, ExactLedger, StreamLedger
from recover.errors import RecoverError

M_co = TypeVar("M_co", covariant=True)
M = TypeVar("M")


@runtime_checkable
class Indexed(Protocol[M_co]):
    """Data addressed by microbatch id: the same id gives the same microbatch on every replica."""

    def __getitem__(self, microbatch_id: int, /) -> M_co: ...


Data = Indexed[M] | Iterable[M]


class Source(Protocol[M_co]):
    """Turns ids into microbatches."""

    def ledger(self, replicas: int) -> DataLedger:
        """Return the ledger that a job of ``replicas`` starts with."""

    def fetch(self, microbatch_id: int) -> M_co:
        """Return a microbatch; it may be asked for again until it is committed."""

    def committed(self, ids: tuple[int, ...]) -> None:
        """Note that these will not be asked for again."""


class IndexedSource:
    """``exact``: each id is committed once over the run, whoever runs it.

    Data of finite length is passed over again and again: id i is item i modulo the length.
    """

    def __init__(self, data: Indexed[M]) -> None:
        self._data: Indexed[object] = data
        self._length = len(data) if isinstance(data, Sized) else None
        if self._length == 0:
            raise ValueError("the data is empty: it has length 0")

    def ledger(self, replicas: int) -> DataLedger:
        return ExactLedger()

    def fetch(self, microbatch_id: int) -> object:
        length = self._length
        return self._data[microbatch_id if length is None else microbatch_id % length]

    def committed(self, ids: tuple[int, ...]) -> None:
        pass


class StreamSource:
    """``stream``: this replica's own endless stream; a dead replica's stream drops out.

    A microbatch is kept until it is committed, since a spare may have to run it again.
    """

    def __init__(self, data: Iterable[M]) -> None:
        self._stream: Iterator[object] = iter(data)
        self._kept: dict[int, object] = {}

    def ledger(self, replicas: int) -> DataLedger:
        return StreamLedger.start(replicas)

    def fetch(self, microbatch_id: int) -> object:
        if microbatch_id not in self._kept:
            try:
                self._kept[microbatch_id] = next(self._stream)
            except StopIteration:
                raise RecoverError(
                    f"this replica's data stream ended at microbatch {microbatch_id}; a stream "
                    "must be endless (wrap it in itertools.cycle), or give data with __getitem__"
                ) from None
        return self._kept[microbatch_id]

    def committed(self, ids: tuple[int, ...]) -> None:
        for microbatch_id in ids:
            self._kept.pop(microbatch_id, None)


def source_of(data: Data[M]) -> IndexedSource | StreamSource:
    """Return the source for what the user gave: by index where the data can be indexed."""
    return IndexedSource(data) if isinstance(data, Indexed) else StreamSource(data)
