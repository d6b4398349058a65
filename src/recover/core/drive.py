"""How a protocol coroutine is run: by hand, one effect at a time. Layer: core.

No event loop is involved. A coroutine that awaits an effect stops there; whoever drives it performs
the effect and answers with its outcome. :func:`drive` does so in one call. A :class:`Driver` can be
advanced from several places: a hook that torch calls in the middle of a backward pass answers the
effects that concern a bucket, the training loop answers those before and after.
"""

from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from recover.core.effects import AnyEffect

T = TypeVar("T")

Protocol = Coroutine[AnyEffect, object, T]
"""A coroutine that awaits effects and returns a T."""


class Driver(Generic[T]):
    """A protocol coroutine and the effect that it waits for.

    Use from one place at a time. An exception that leaves the coroutine leaves the constructor or
    :meth:`answer`, whichever made it run.
    """

    def __init__(self, protocol: Protocol[T]) -> None:
        """Run ``protocol`` up to its first effect."""
        self._protocol = protocol
        self._pending: AnyEffect | None = None
        self._returned: list[T] = []
        self._run(None)

    @property
    def done(self) -> bool:
        """Whether the coroutine has returned."""
        return bool(self._returned)

    @property
    def pending(self) -> AnyEffect | None:
        """The effect to perform next; None once the coroutine has returned."""
        return self._pending

    @property
    def result(self) -> T:
        """What the coroutine returned."""
        assert self._returned, f"the protocol has not returned, it waits for {self._pending}"
        return self._returned[0]

    def answer(self, outcome: object) -> None:
        """Give the outcome of the pending effect; run the coroutine up to its next one."""
        assert not self._returned, "the protocol has returned and waits for no outcome"
        self._run(outcome)

    def close(self) -> None:
        """Give up: end the coroutine where it stands."""
        self._protocol.close()

    def _run(self, outcome: object) -> None:
        try:
            self._pending = self._protocol.send(outcome)
        except StopIteration as stop:
            self._pending = None
            self._returned.append(stop.value)


def drive(protocol: Protocol[T], perform: Callable[[AnyEffect], object]) -> T:
    """Run ``protocol`` to its end; ``perform`` gets each effect and returns its outcome."""
    driver = Driver(protocol)
    while (effect := driver.pending) is not None:  # ends when the protocol does
        driver.answer(perform(effect))
    return driver.result
