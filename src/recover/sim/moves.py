"""What an adversary may do, and where. Layer: sim.

A *point* is a meeting of a group in a collective, or a local effect of one rank. The texts of
points and moves are the language of scenario files and traces.
"""

from dataclasses import dataclass
from enum import StrEnum

from recover.core.effects import (
    Accumulate,
    Agree,
    Census,
    Commit,
    Detect,
    Discard,
    Effect,
    NextBucket,
    Recovered,
    Reduce,
    Regroup,
    Restore,
    Shrink,
    Snapshot,
)
from recover.core.mesh import Place

Asked = Effect[object]


class When(StrEnum):
    """Relative to what the others see of the victim."""

    BEFORE = "before"
    """The victim does not arrive; in a local effect: it has done nothing, or a part of it."""
    DURING = "during"
    """The victim arrived and its part counts, but it does not see the outcome."""
    AFTER = "after"
    """Local effects: it is done."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where the job is when the adversary may strike."""

    step: int
    epoch: int
    name: str

    def __str__(self) -> str:
        return f"step {self.step}, epoch {self.epoch}, {self.name}"


@dataclass(frozen=True, slots=True)
class Kill:
    """The rank is gone."""

    place: Place
    when: When

    def __str__(self) -> str:
        return f"kill {self.place} {self.when}"


@dataclass(frozen=True, slots=True)
class Exclude:
    """The others take the rank for dead; it does not know and runs on."""

    place: Place
    when: When

    def __str__(self) -> str:
        return f"exclude {self.place} {self.when}"


@dataclass(frozen=True, slots=True)
class Glitch:
    """The transport fails although everybody is alive."""

    def __str__(self) -> str:
        return "glitch during"


Move = Kill | Exclude | Glitch


@dataclass(frozen=True, slots=True)
class Budget:
    """What an adversary may do in a run. At least one replica is always left alone.

    A death, like an exclusion, costs once per *replica*: a rank that lost a peer may die at any
    later point for free, since it cannot do without. ``every_point`` adds moves that no survivor
    can tell from others: deaths in local effects, and those inside a uniform collective. (Both look
    like a death before the victim's next collective.)
    """

    kills: int = 0
    excludes: int = 0
    glitches: int = 0
    every_point: bool = False


_AGREEMENTS = {Census: "census-verdict", Regroup: "regroup-verdict"}
_NAMES = {
    Accumulate: "accumulate",
    Census: "census",
    Commit: "commit",
    Discard: "discard",
    NextBucket: "next-bucket",
    Recovered: "plan",
    Regroup: "regroup",
    Restore: "restore",
    Shrink: "shrink",
}


def name(effect: Asked, after: type[Asked] | None) -> str:
    """Return what people call this effect, given the rank's last collective."""
    if isinstance(effect, Detect | Reduce | Snapshot):
        return f"{type(effect).__name__.lower()} {effect.bucket}"
    if isinstance(effect, Agree):
        return _AGREEMENTS.get(after, "consensus") if after else "consensus"
    if isinstance(effect, Accumulate) and effect.extra:
        return "extra"
    return _NAMES[type(effect)]
