"""The referee's own policy: against the paper's numbers, and against the core's."""

from itertools import combinations

import pytest

from recover.core.policies import AdaptiveWorldPolicy, StaticWorldPolicy
from recover.core.workload import Shares, roles_after
from recover.sim.rulebook import Load, Rulebook


def plain(shares: Shares) -> dict[int, Load]:
    return {r: (s.microbatches, s.admitted) for r, s in shares.items()}


def test_figure_5() -> None:
    rules = Rulebook(256, 32)
    assert rules.layout(range(32)) == dict.fromkeys(range(32), (8, True))
    boundary = rules.mend(dict.fromkeys(range(31), (8, True)))
    assert boundary.extra == {r: int(r < 8) for r in range(31)}
    advanced = rules.layout(range(31))
    assert list(advanced.values()) == [(9, True)] * 28 + [(4, True), (9, False), (4, False)]
    lost = {r: load for r, load in advanced.items() if r != 28}
    assert rules.mend(lost).promoted == (30,)


def test_the_strawman() -> None:
    rules = Rulebook(8, 4, adaptive=True)
    assert rules.layout([0, 2]) == {0: (2, True), 2: (2, True)}
    assert rules.divisor(4) == 4


@pytest.mark.parametrize("replicas", range(1, 8))
def test_two_independent_policies_agree(replicas: int) -> None:
    """Every B up to 6 per replica, every set of deaths."""
    for microbatches in range(1, 6 * replicas + 1):
        policy, rules = StaticWorldPolicy(microbatches), Rulebook(microbatches, replicas)
        layout = policy.advance(range(replicas))
        assert plain(layout.shares) == rules.layout(range(replicas))
        assert layout.accumulation == rules.accumulation(replicas)
        for left in range(1, replicas + 1):
            for survivors in combinations(range(replicas), left):
                adjustment = policy.adjust({r: layout.shares[r] for r in survivors})
                mended = rules.mend({r: plain(layout.shares)[r] for r in survivors})
                assert plain(adjustment.shares) == mended.loads
                assert dict(adjustment.extra) == mended.extra
                assert adjustment.promoted == mended.promoted
                roles = rules.roles(plain(layout.shares), mended.loads, mended.extra)
                assert dict(roles_after(layout, adjustment)) == roles


def test_two_independent_strawmen_agree() -> None:
    for replicas in range(1, 7):
        for microbatches in range(replicas, 4 * replicas):
            policy = AdaptiveWorldPolicy(microbatches, replicas)
            rules = Rulebook(microbatches, replicas, adaptive=True)
            for left in range(1, replicas + 1):
                layout = policy.advance(range(left))
                assert plain(layout.shares) == rules.layout(range(left))
                assert layout.accumulation == rules.accumulation(left)
