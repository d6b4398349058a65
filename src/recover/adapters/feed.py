"""What a framework's loop is given instead of a data loader: steps. Layer: adapters.

A framework iterates over a loader, runs its training step on every item and steps the optimizer.
Here an item is a :class:`Share`, this replica's part of one step, so one item is one update,
however many microbatches it turns out to hold. :class:`Microbatches` makes the training set
addressable by microbatch id, the same on every replica, which lets a survivor run what another one
has lost.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from recover.errors import RecoverError
from recover.train.step import Step

M = TypeVar("M")
T = TypeVar("T")


class Items(Protocol):
    """A dataset that is addressed by index."""

    def __getitem__(self, index: int, /) -> object: ...


class Share(Generic[M]):
    """This replica's part of a step, as one item of a loader.

    It is no collection on purpose: a framework that looks into its batches must find nothing here,
    since going through a step is what runs it.
    """

    def __init__(self, step: Step[M]) -> None:
        self.step = step
        self.ran = 0
        """Microbatches that this replica has run, extra ones included."""
        self.flops = 0.0
        """Floating-point operations of those, where the framework counts them."""

    def __contains__(self, key: object) -> bool:
        return False


class Feed(Generic[M]):
    """Stands in for the training loader: ``length`` steps an epoch, all from one run of steps.

    ``start`` returns that run; it is called when the first step is asked for, since only then do
    frameworks have the model and the optimizer ready.
    """

    def __init__(self, length: int, start: Callable[[], Iterator[Step[M]]]) -> None:
        self._length, self._start = length, start
        self._steps: Iterator[Step[M]] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Share[M]]:
        if self._steps is None:  # not before the first item: frameworks call iter() in advance
            self._steps = self._start()
        yield from (Share(step) for step in itertools.islice(self._steps, self._length))

    def finish(self) -> None:
        """End the run with all survivors; a second call does nothing.

        Raises RecoverError where steps are left: replicas cannot agree to stop early.
        """
        for step in self._steps or ():
            raise RecoverError(
                f"the training was stopped before step {step.number}; stopping early (a callback, "
                "a time limit) is not supported: say beforehand how many steps there are"
            )


class Microbatches:
    """Microbatch i as a function of i alone.

    A pass over the data is ``length`` microbatches; passes follow each other without a gap.
    ``order`` returns, for the number of a pass, the indices of each of its microbatches, and must
    do so as a pure function. The first ``skipped`` microbatches are left out.
    """

    def __init__(
        self,
        dataset: Items,
        collate: Callable[[list[object]], object],
        order: Callable[[int], Sequence[Sequence[int]]],
        *,
        length: int,
        skipped: int = 0,
    ) -> None:
        if length < 1:
            raise ValueError("the training set does not fill a single microbatch")
        self._dataset, self._collate, self._order = dataset, collate, order
        self._length, self._skipped = length, skipped
        self._passes: dict[int, Sequence[Sequence[int]]] = {}

    def __getitem__(self, microbatch_id: int) -> object:
        number, place = divmod(microbatch_id + self._skipped, self._length)
        indices = self._pass(number)[place]
        together = getattr(self._dataset, "__getitems__", None)
        if together is not None:
            return self._collate(list(together(list(indices))))
        return self._collate([self._dataset[index] for index in indices])

    def _pass(self, number: int) -> Sequence[Sequence[int]]:
        if number not in self._passes:
            batches = self._order(number)
            if len(batches) != self._length:
                raise RecoverError(
                    f"pass {number} over the training set has {len(batches)} microbatches and not "
                    f"{self._length}: a sampler must give equally many in every pass"
                )
            for old in [kept for kept in self._passes if kept < number - 1]:
                del self._passes[old]
            self._passes[number] = batches
        return self._passes[number]


def drawn(sampler: Iterable[T], seed: int) -> list[T]:
    """Return what a sampler gives when torch's generator starts from ``seed``, and leave no trace.

    That makes a pass equal on all replicas, and again whenever it is asked for.
    """
    own = getattr(getattr(sampler, "sampler", sampler), "generator", None)
    state = torch.default_generator.get_state()
    try:
        for generator in (torch.default_generator, own):
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        return list(sampler)
    finally:
        torch.default_generator.set_state(state)


def own_stream(loader: Iterable[M], replica: int, replicas: int) -> Iterator[M]:
    """Yield every ``replicas``-th microbatch of a loader that knows no indices, without end."""
    while True:
        microbatch = None
        for microbatch in itertools.islice(loader, replica, None, replicas):
            yield microbatch
        if microbatch is None:
            raise RecoverError(f"the training set holds no microbatch for replica {replica}")
