"""Roles and shares: how B microbatches are spread over the survivors. Layer: core.

Two pure functions carry the versatile workload (Section 4.3): :func:`advance` gives the layout of
an undisturbed iteration (Algorithm 7), :func:`adjust` mends the iteration in which replicas died
(Algorithm 6). Both are exact for any number of survivors and any set of deaths at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a replica does in an iteration; always derived from its share, never stored."""

    MAJOR = "major"
    MINOR = "minor"
    MAJOR_SPARE = "major_spare"
    MINOR_SPARE = "minor_spare"
    BOUNDARY_MINOR = "boundary_minor"


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica brings to the sum: microbatches run, and whether they count."""

    microbatches: int
    admitted: bool

    @property
    def contribution(self) -> int:
        """Microbatches of this share that enter the reduced gradient."""
        return self.microbatches if self.admitted else 0


Shares = Mapping[int, Share]


@dataclass(frozen=True, slots=True)
class Layout:
    """The shares of an undisturbed iteration, keyed by replica in ascending order."""

    shares: Shares
    accumulation: int
    """G: microbatches of a major."""

    def role(self, replica: int) -> Role:
        """Return the role that ``replica`` plays."""
        return role_of(self.shares[replica], self.accumulation)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """How the survivors make up for what a failure took, within the same iteration."""

    shares: Shares
    """The survivors' shares once every extra microbatch has run."""
    extra: Mapping[int, int]
    """Microbatches that each survivor runs in addition; 0 or more."""
    promoted: tuple[int, ...]
    """Spares whose finished microbatches now count."""
    discarded: tuple[int, ...]
    """Spares whose finished microbatches are dropped, because they run extra ones that count."""

    @property
    def boundary(self) -> bool:
        """Whether the failure crossed the policy boundary: spares did not cover the loss."""
        return any(self.extra.values())


def role_of(share: Share, accumulation: int) -> Role:
    """Return the role that a share amounts to, given G."""
    if share.microbatches == accumulation:
        return Role.MAJOR if share.admitted else Role.MAJOR_SPARE
    return Role.MINOR if share.admitted else Role.MINOR_SPARE


def advance(survivors: Sequence[int], microbatches: int) -> Layout:
    """Lay out an undisturbed iteration of ``microbatches`` over ``survivors`` (Algorithm 7).

    G is the smallest accumulation with W x G >= B. B // G replicas are majors, one minor takes the
    remainder, the rest are spares: one minor-spare if there is a minor and at least two spares,
    major-spares otherwise. Every replica runs at least one microbatch.

    Raises ValueError unless there is a survivor and ``microbatches`` is at least 1.
    """
    world = len(survivors)
    if world < 1:
        raise ValueError("a layout needs at least one survivor")
    if microbatches < 1:
        raise ValueError(f"microbatches (B) must be at least 1, got {microbatches}")
    accumulation = -(-microbatches // world)
    majors, remainder = divmod(microbatches, accumulation)
    minors = 1 if remainder else 0
    spares = world - majors - minors
    minor_spares = 1 if minors and spares >= 2 else 0
    shares = (
        [Share(accumulation, True)] * majors
        + [Share(remainder, True)] * minors
        + [Share(accumulation, False)] * (spares - minor_spares)
        + [Share(remainder, False)] * minor_spares
    )
    return Layout(dict(zip(sorted(survivors), shares, strict=True)), accumulation)


def adjust(census: Shares, microbatches: int) -> Adjustment:
    """Bring the survivors' sum back to ``microbatches`` after any set of deaths (Algorithm 6).

    Spares are admitted, largest first, while they fit; what is still missing is spread as evenly
    as possible over all survivors, G_ext for the first and one less for the others (the boundary
    minors). A spare that is not admitted but runs extra microbatches contributes those alone.

    The paper promotes by role and sizes the extension from the survivors' total; read literally
    that overshoots B when a minor dies and only a major-spare is left.
    """
    assert census, "the census of a survivor names at least that survivor"
    missing = microbatches - sum(share.contribution for share in census.values())
    assert missing >= 0, f"survivors hold {-missing} microbatches more than B={microbatches}"
    promoted = []
    for replica in sorted(census, key=lambda r: (-census[r].microbatches, r)):
        share = census[replica]
        if not share.admitted and share.microbatches <= missing:
            promoted.append(replica)
            missing -= share.microbatches
    everyone, first = divmod(missing, len(census))
    extra = {r: everyone + (i < first) for i, r in enumerate(sorted(census))}
    discarded = tuple(r for r in extra if extra[r] and not census[r].admitted and r not in promoted)
    shares = {
        r: Share(
            (0 if r in discarded else census[r].microbatches) + extra[r],
            census[r].admitted or r in promoted or r in discarded,
        )
        for r in extra
    }
    return Adjustment(shares, extra, tuple(sorted(promoted)), discarded)


def roles_after(layout: Layout, adjustment: Adjustment) -> dict[int, Role]:
    """Return the survivors' roles in an iteration that was adjusted.

    At a boundary, those who run fewer extra microbatches than the others are boundary minors.
    """
    most = max(adjustment.extra.values())
    roles = {}
    for replica, extra in adjustment.extra.items():
        if extra < most:
            roles[replica] = Role.BOUNDARY_MINOR
        else:
            planned = layout.shares[replica]
            admitted = adjustment.shares[replica].admitted
            roles[replica] = role_of(Share(planned.microbatches, admitted), layout.accumulation)
    return roles
