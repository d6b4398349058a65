"""One virtual rank: its coroutine, its memory, the groups it is in. Layer: sim."""

import inspect
import types
from collections.abc import Callable, Coroutine, Hashable
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from recover.core.effects import Effect
from recover.core.guard import Member, UnequalReplicas
from recover.core.mesh import Place
from recover.sim.gradients import Memory, Violation
from recover.sim.liveness import live

T = TypeVar("T")

Program = Callable[[Member], Coroutine[Any, Any, T]]
"""What every rank runs."""


class Group:
    """Ranks that meet in collectives, under one epoch."""

    __slots__ = ("epoch", "members", "revoked")

    def __init__(self, members: tuple[Place, ...], epoch: int) -> None:
        self.members = members
        self.epoch = epoch
        self.revoked = False

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas with a rank in this group."""
        return tuple(sorted({place.replica for place in self.members}))


class Status(Enum):
    """How a rank stands."""

    RUNNING = "running"
    DEAD = "dead"
    LEFT = "left"
    FINISHED = "finished"
    RAISED = "raised"


class VirtualRank(Generic[T]):
    """A rank of the virtual job."""

    def __init__(
        self, member: Member, program: Program[T], memory: Memory, job: Group, cross: Group
    ) -> None:
        self.place = member.place
        self.memory = memory
        self.job = job
        self.cross = cross
        self.status = Status.RUNNING
        self.excluded = False
        self.live = True
        """Whether the others wait for this rank."""
        self.step = 0
        self.waits: Effect[Any] | None = None
        """The collective that this rank waits in."""
        self.after: type[Effect[Any]] | None = None
        """The last collective that it came out of."""
        self.pending: tuple[Group, Group] | None = None
        """New groups that the next agreement adopts."""
        self.result: list[T] = []
        self.error: Exception | None = None
        self._coroutine = program(member)
        self._key: int | None = None
        self._told = 0

    def resume(self, outcome: object) -> Effect[Any] | None:
        """Run up to the next effect; None once the program has ended."""
        self._key = None
        census = tuple(outcome.items()) if isinstance(outcome, dict) else outcome
        self._told = hash((self._told, census))
        if self.waits is not None:
            self.after, self.waits = type(self.waits), None
        try:
            effect = self._coroutine.send(outcome)
        except StopIteration as stop:
            self.status = Status.FINISHED
            self.result.append(stop.value)
            return None
        except UnequalReplicas as error:
            self.status, self.live = Status.RAISED, False
            self.error = error
            return None
        except Exception as bug:
            raise Violation(f"rank {self.place} fails: {bug!r}") from bug
        assert isinstance(effect, Effect), f"a program awaits effects only, not {effect!r}"
        return effect

    def end(self, status: Status) -> None:
        """Stop running."""
        self.status, self.live = status, False
        self.waits = None
        self._key = None
        self._coroutine.close()

    def close(self) -> None:
        """Let go of the program."""
        self._coroutine.close()

    def exclude(self) -> None:
        """Be taken for dead."""
        self.excluded, self.live = True, False
        self._key = None

    def key(self, known: dict[object, Hashable]) -> Hashable:
        """Return a value that is equal for ranks that behave equally from here on.

        ``known`` keeps the states of coroutines by what they were told, from one run to the next.
        """
        if self.status is not Status.RUNNING:
            return (self.status, freeze(self.result))
        if self._key is None:
            told = (self.place, self._told)
            state = known.get(told)
            if state is None:
                state = known[told] = hash(freeze(self._coroutine))
            self._key = hash((state, self.excluded, self.step, self.after, self.memory.key()))
        groups = (self.job, self.cross, *(self.pending or ()))
        return (self._key, tuple([(g.epoch, g.members, g.revoked) for g in groups]))


def freeze(value: Any) -> Hashable:
    """Return a hashable value that tells apart what a coroutine could tell apart.

    A suspended coroutine is its instruction pointers and live local variables, down the chain of
    coroutines that it awaits. State in a hidden iterator (``for ... in ...: await``) is not seen: a
    program under exhaustive search keeps what it knows in local variables.
    """
    kind = type(value)
    if kind in _PLAIN:
        return cast(Hashable, value)
    if kind is tuple or kind is list:
        return tuple([freeze(item) for item in value])
    if kind is set:
        return frozenset(map(freeze, value))
    if kind is dict:
        return tuple([(freeze(key), freeze(item)) for key, item in value.items()])
    if inspect.iscoroutine(value):
        return _frames(value.cr_frame, value.cr_await)
    if inspect.isgenerator(value):
        return _frames(value.gi_frame, value.gi_yieldfrom)
    try:
        hash(value)  # a frozen value all through, or a thing of which there is only one
    except TypeError:
        return (kind, *[freeze(getattr(value, name)) for name in kind.__dataclass_fields__])
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Enum):
        return (kind, freeze(vars(value)))
    return cast(Hashable, value)


_PLAIN = frozenset({int, bool, str, type(None), frozenset})


def _frames(frame: types.FrameType | None, awaited: object) -> Hashable:
    if frame is None:
        return "ended"
    names = live(frame.f_code, frame.f_lasti)
    known = [(name, freeze(value)) for name, value in frame.f_locals.items() if name in names]
    below = None if isinstance(awaited, Effect) else freeze(awaited)
    return (frame.f_code, frame.f_lasti, tuple(known), below)
