"""A run as text that people read and review. Layer: sim.

Consecutive local effects of ranks that do alike are one line; each meeting is one line. Of the many
collectives of a quiet run only what is worth reading is left: a step that nothing disturbs is its
microbatches and its commit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recover.core.effects import Accumulate, Discard, Effect, Facts, Recovered, Restore
from recover.core.mesh import Place
from recover.sim.gradients import Reduced
from recover.sim.moves import Glitch, Move, Point, name
from recover.sim.observer import Observer
from recover.sim.ranks import Status, VirtualRank


class Trace(Observer):
    """Collects lines."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._lines: list[str] = []
        self._together: dict[str, list[Place]] = {}
        self._ids: dict[str, set[int]] = {}

    def text(self) -> str:
        """Return the whole trace."""
        self._flush()
        return "\n".join(self._lines)

    def local(self, rank: VirtualRank[Any], effect: Effect[Any]) -> None:
        """Note what a rank does by itself."""
        match effect:
            case Accumulate(ids, extra):
                what = "extra microbatch" if extra else "microbatch"
                text = f"run {len(ids)} {what}{'es' if len(ids) > 1 else ''}"
                self._ids.setdefault(text, set()).update(ids)
                self._do(text, rank)
            case Restore(buckets, mode) if buckets:
                self._do(f"restore buckets {spans(buckets)} ({mode})", rank)
            case Restore():
                self._do("nothing to restore", rank)
            case Discard():
                self._do("discard the spare gradient", rank)
            case Recovered(recovery):
                self._do(
                    f"plan: epoch {recovery.epoch}, lost replicas {spans(recovery.failed)}, "
                    f"promote {spans(recovery.promoted)}, "
                    f"extra {_by_count(recovery.extra)}"
                    + (", policy boundary" if recovery.boundary else ""),
                    rank,
                )

    def committed(self, rank: VirtualRank[Any], facts: Facts, buckets: tuple[Reduced, ...]) -> None:
        """Note a commit."""
        ids = [i for a in facts.plan.values() if a.admitted for i in a.ids]
        roles: dict[str, list[int]] = {}
        for replica, role in facts.roles.items():
            roles.setdefault(role.value, []).append(replica)
        shown = "; ".join(f"{role} {spans(replicas)}" for role, replicas in roles.items())
        counts = _by_count(facts.contributions)
        self._do(
            f"COMMIT step {facts.step}: {len(ids)} microbatches {spans(ids)} / {facts.divisor}, "
            f"epoch {facts.epoch}, G={facts.accumulation}, contributions {counts}; {shown}",
            rank,
        )

    def met(
        self,
        point: Point,
        arrived: Sequence[VirtualRank[Any]],
        outcomes: Mapping[Place, object],
    ) -> None:
        """Note a meeting."""
        self._flush()
        good = [p for p, outcome in outcomes.items() if outcome not in (None, False)]
        bad = [p for p, outcome in outcomes.items() if outcome is None or outcome is False]
        column = f"[{self._spans(rank.place for rank in arrived)}] {point.name}"
        if not outcomes:
            self._lines.append(f"  {column}: nobody is left")
        elif point.name == "shrink":
            self._lines.append(f"  {column}: epoch {outcomes[good[0]]}")
        elif not bad:
            self._lines.append(f"  {column}: yes")
        elif not good:
            self._lines.append(f"  {column}: no")
        else:
            self._lines.append(f"  {column}: yes on {self._spans(good)}, no on {self._spans(bad)}")

    def refused(self, rank: VirtualRank[Any], effect: Effect[Any]) -> None:
        """Note a collective that failed without a meeting."""
        why = "excluded" if rank.excluded else "revoked"
        self._do(f"{name(effect, rank.after)} fails ({why})", rank)

    def struck(self, point: Point, move: Move) -> None:
        """Note a move of the adversary."""
        self._flush()
        what = "the transport fails in" if isinstance(move, Glitch) else f"{move}"
        self._lines.append(f"  ! {what} {point.name}")

    def ended(self, rank: VirtualRank[Any], reason: str) -> None:
        """Note who has ended."""
        words = {
            Status.FINISHED: "finished",
            Status.LEFT: f"leave ({reason})",
            Status.RAISED: f"raise {rank.error}",
        }
        self._do(words[rank.status], rank)

    def _do(self, text: str, rank: VirtualRank[Any]) -> None:
        self._together.setdefault(text, []).append(rank.place)

    def _flush(self) -> None:
        for text, places in self._together.items():
            ids = f" {spans(self._ids[text])}" if text in self._ids else ""
            indent = "" if text.startswith("COMMIT") else "  "
            self._lines.append(f"{indent}{self._spans(places)}: {text}{ids}")
        self._together.clear()
        self._ids.clear()

    def _spans(self, places: Iterable[Place]) -> str:
        """Name ranks briefly: whole replicas by number, others as replica.shard."""
        shards: dict[int, list[int]] = {}
        for place in sorted(places):
            shards.setdefault(place.replica, []).append(place.shard)
        whole = [r for r, present in shards.items() if len(present) == self._shards]
        if self._shards == 1:
            return spans(whole)
        column = {tuple(present) for present in shards.values()}
        if len(column) == 1 and len(shards) > 1 and len(whole) < len(shards):
            return f"{spans(shards)}.{spans(column.pop())}"
        parts = [f"{r}.{s}" for r, present in shards.items() if r not in whole for s in present]
        return " ".join([f"{spans(whole)}.*", *parts] if whole else parts)


def spans(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: 0-3,7; none as "none"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts) or "none"


def _by_count(numbers: Mapping[int, int]) -> str:
    """Write {0: 1, 1: 1, 2: 0} as "0-1: 1, 2: 0"."""
    by_number: dict[int, list[int]] = {}
    for key, number in numbers.items():
        by_number.setdefault(number, []).append(key)
    return " ".join(f"{spans(keys)}:{n}" for n, keys in sorted(by_number.items(), reverse=True))
