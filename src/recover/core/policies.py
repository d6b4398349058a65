"""Who runs how much, and what the sum is divided by. Layer: core.

A policy is a pure planner. :class:`StaticWorldPolicy` is the product (Section 4.3);
:class:`AdaptiveWorldPolicy` is the strawman of Appendix D.5, kept as an isolation baseline: it
repairs and continues, and lets B shrink with the world.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from recover.core.workload import Adjustment, Layout, Share, Shares, adjust, advance


class RestoreMode(StrEnum):
    """When a rank rewinds the buckets that a failure made stale (Algorithm 5)."""

    SKIP = "skip"
    """Nothing here was reduced under the old membership."""
    BLOCKING = "blocking"
    """Rewind in line, then reduce again."""
    NON_BLOCKING = "non_blocking"
    """Rewind on a side stream behind the forward pass of the first extra microbatch."""


class RestoreChoice(StrEnum):
    """What the user asks for; ``auto`` follows the paper."""

    AUTO = "auto"
    BLOCKING = "blocking"
    NON_BLOCKING = "non_blocking"

    def mode(self, *, stale: bool, extra: bool) -> RestoreMode:
        """Return how this rank restores, given whether it has stale buckets and extra work.

        The mode only schedules a local copy, so ranks may differ in it. Without extra
        microbatches there is nothing to hide the copy behind, so it is made in line.
        """
        if not stale:
            return RestoreMode.SKIP
        if self is RestoreChoice.BLOCKING or not extra:
            return RestoreMode.BLOCKING
        return RestoreMode.NON_BLOCKING


class Policy(Protocol):
    """A pure planner, equal on every rank."""

    @property
    def microbatches(self) -> int:
        """B: microbatches that an undisturbed iteration commits at the start of the job."""

    def advance(self, survivors: Sequence[int]) -> Layout:
        """Lay out the next iteration."""

    def adjust(self, census: Shares) -> Adjustment:
        """Mend the running iteration after deaths."""

    def divisor(self, contributions: int) -> int:
        """Return what the summed gradient of ``contributions`` microbatches is divided by."""


@dataclass(frozen=True, slots=True)
class StaticWorldPolicy:
    """Every iteration commits exactly ``microbatches``, whoever is left."""

    microbatches: int

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches (B) must be at least 1, got {self.microbatches}")

    def advance(self, survivors: Sequence[int]) -> Layout:
        """Lay out B microbatches over the survivors (Algorithm 7)."""
        return advance(survivors, self.microbatches)

    def adjust(self, census: Shares) -> Adjustment:
        """Promote spares, then spread what is missing (Algorithm 6)."""
        return adjust(census, self.microbatches)

    def divisor(self, contributions: int) -> int:
        """Return B."""
        assert contributions == self.microbatches, (contributions, self.microbatches)
        return self.microbatches


@dataclass(frozen=True, slots=True)
class AdaptiveWorldPolicy:
    """Repair and continue with what is left: the global batch shrinks (Algorithm 8).

    Needs ``microbatches >= replicas``, so that no survivor is ever without a contribution.
    """

    microbatches: int
    replicas: int

    def __post_init__(self) -> None:
        if not self.microbatches >= self.replicas >= 1:
            raise ValueError(
                "the adaptive policy needs microbatches (B) >= replicas >= 1, "
                f"got B={self.microbatches}, replicas={self.replicas}"
            )

    def advance(self, survivors: Sequence[int]) -> Layout:
        """Give every survivor the share that it had at the start of the job."""
        everyone, first = divmod(self.microbatches, self.replicas)
        shares = {r: Share(everyone + (r < first), True) for r in sorted(survivors)}
        return Layout(shares, everyone + (first > 0))

    def adjust(self, census: Shares) -> Adjustment:
        """Change nothing: no promotion, no extra microbatch, no boundary."""
        return Adjustment(dict(census), dict.fromkeys(census, 0), (), ())

    def divisor(self, contributions: int) -> int:
        """Return the number of contributions."""
        return contributions
