"""What should happen, computed a second time and differently. Layer: sim.

Written from the paper (Section 4.3, Algorithms 6, 7, 8) one microbatch at a time, and independent
of ``recover.core.workload``: a mistake there should not be repeated here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Load = tuple[int, bool]
"""Microbatches run, and whether they count."""


@dataclass(frozen=True, slots=True)
class Mended:
    """How an iteration should go on after deaths."""

    loads: dict[int, Load]
    extra: dict[int, int]
    promoted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rulebook:
    """The rules of a job."""

    microbatches: int
    replicas: int
    adaptive: bool = False

    def accumulation(self, survivors: int) -> int:
        """Return G."""
        world, each = (self.replicas if self.adaptive else survivors), 1
        while world * each < self.microbatches:
            each += 1
        return each

    def layout(self, survivors: Iterable[int]) -> dict[int, Load]:
        """Deal out B microbatches, G at a time; who gets none keeps a spare copy of a load."""
        order = sorted(survivors)
        most = self.accumulation(len(order))
        if self.adaptive:
            dealt = dict.fromkeys(range(self.replicas), 0)
            for k in range(self.microbatches):
                dealt[k % self.replicas] += 1
            return {r: (dealt[r], True) for r in order}
        left, loads = self.microbatches, dict[int, Load]()
        for replica in order:
            load = min(most, left)
            loads[replica] = (load, True)
            left -= load
        idle = [r for r in order if loads[r][0] == 0]
        remainder = min(load for load, _ in loads.values() if load)
        for replica in idle:
            loads[replica] = (most, False)
        if remainder < most and len(idle) >= 2:
            loads[idle[-1]] = (remainder, False)
        return loads

    def mend(self, loads: Mapping[int, Load]) -> Mended:
        """Promote spares that fit, the largest first; deal out what is then missing, one by one."""
        mended, extra = dict(loads), dict.fromkeys(sorted(loads), 0)
        promoted = []
        if self.adaptive:
            return Mended(mended, extra, ())
        missing = self.microbatches - sum(n for n, counts in loads.values() if counts)
        for replica in sorted(extra, key=lambda r: -loads[r][0]):
            n, counts = loads[replica]
            if not counts and n <= missing:
                mended[replica] = (n, True)
                promoted.append(replica)
                missing -= n
        while missing > 0:  # ends: every turn deals out at least one
            for replica in extra:
                if missing > 0:
                    n, counts = mended[replica]
                    mended[replica] = (n + 1, True) if counts else (1, True)
                    extra[replica] += 1
                    missing -= 1
        return Mended(mended, extra, tuple(sorted(promoted)))

    def divisor(self, contributions: int) -> int:
        """Return what the sum is divided by."""
        return contributions if self.adaptive else self.microbatches

    def roles(
        self, planned: Mapping[int, Load], loads: Mapping[int, Load], extra: Mapping[int, int]
    ) -> dict[int, str]:
        """Name what the survivors do: ``planned`` before the step, ``loads`` in the end."""
        most = self.accumulation(len(planned))
        roles = {}
        for replica, (_, counts) in loads.items():
            full = planned[replica][0] == most
            roles[replica] = ("major" if full else "minor") + ("" if counts else "_spare")
            if extra[replica] < max(extra.values()):
                roles[replica] = "boundary_minor"
        return roles
