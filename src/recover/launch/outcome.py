"""How a job ended: status, summary and the short block of reasons. Layer: launch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recover.core.mesh import Mesh
from recover.launch import layout, note

HANG = "hang"
"""The launcher ended the rank."""
LOST = "lost"
"""The rank died without a word."""
_ORDER = (note.FAILED, HANG, note.LEFT, LOST, note.INJECTED, note.CONDEMNED)
_LISTED = 8


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended that did not finish, or failed after it had."""

    world_rank: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    mesh: Mesh
    out: Path
    finished: tuple[int, ...]
    """World ranks that did everything there was to do."""
    ends: tuple[RankEnd, ...]
    """The others that ended by themselves, exceptions first."""
    problem: str = ""
    """Why the job as a whole did not finish, if it did not."""
    signal: int = 0
    """The signal that ended the job, if one did."""
    details: tuple[str, ...] = ()
    """What mpirun said, where the ranks had no chance to say anything."""

    @property
    def status(self) -> int:
        """The exit status: 0 only if the job reached its end."""
        if self.signal:
            return 128 + self.signal
        return 1 if self.problem else 0

    @property
    def summary(self) -> str:
        """One line for a job that finished."""
        size = self.mesh.world_size
        if not self.ends:
            return f"finished on all {size} ranks"
        lost = "; ".join(f"{who}: {end.reason}" for who, end in self._groups())
        return f"finished on {len(self.finished)} of {size} ranks ({lost})"

    def block(self) -> str:
        """Return the lines that explain a job that did not finish."""
        lines = [f"recover: the job did not finish: {self.problem}"]
        groups = list(self._groups())
        for who, end in groups[:_LISTED]:
            log = layout.rank_log(self.out, end.world_rank)
            lines += [f"  {who}: {end.reason}", f"    log: {log}"]
        if len(groups) > _LISTED:
            lines.append(f"  and {len(groups) - _LISTED} more: {layout.logs(self.out)}")
        lines += [f"  mpirun: {line}" for line in self.details]
        if self.details:
            lines.append(f"    log: {layout.mpirun_log(self.out)}")
        return "\n".join(lines)

    def _groups(self) -> Iterable[tuple[str, RankEnd]]:
        """Tell equal reasons as one: by kind, then who was found first."""
        groups: dict[tuple[str, str], list[RankEnd]] = {}
        for end in self.ends:
            groups.setdefault((end.kind, end.reason), []).append(end)
        for group in sorted(groups.values(), key=lambda group: _ORDER.index(group[0].kind)):
            world_ranks = sorted(end.world_rank for end in group)
            yield self._names(world_ranks), replace(group[0], world_rank=world_ranks[0])

    def _names(self, world_ranks: Sequence[int]) -> str:
        word = "replica" if self.mesh.ranks_per_replica == 1 else "rank"
        return f"{word}{'s' if len(world_ranks) > 1 else ''} {_ranges(world_ranks)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
