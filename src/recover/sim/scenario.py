"""Golden conversations: a scripted run and its trace in one text that people review. Layer: sim.

    # What this shows, in sentences.
    job: replicas=3 microbatches=6 steps=2
    step 0: kill 2.0 during reduce 1, fails on 0
    step 1, epoch 1: kill 1.0 before shrink
    ---
    (the trace)

A cue is ``step S[, epoch E]: MOVE POINT[, fails on RANKS]``. Moves: ``kill R.S
before|during|after``, ``exclude R.S before|during``, ``glitch during``. Points: ``accumulate``,
``detect B``, ``reduce B``, ``consensus``, ``shrink``, ``census``, ``census-verdict``, ``regroup``,
``regroup-verdict``, ``restore``, ``discard``, ``extra``, ``commit``. RANKS: replicas such as
``0-3,7`` (all their shards), or ``1.0``. Without ``epoch`` a cue comes up at its first opportunity
in the step; without ``fails on`` a disturbed collective fails everywhere.
"""

import re
from dataclasses import dataclass

from recover.core.mesh import Place
from recover.sim.adversary import Cue, Scripted
from recover.sim.job import Job, play
from recover.sim.trace import Trace

_RULE = "---"
_CUE = re.compile(
    r"step (?P<step>\d+)(?:, epoch (?P<epoch>\d+))?: "
    r"(?P<move>(?:kill|exclude) \d+\.\d+ (?:before|during|after)|glitch during) "
    r"(?P<point>[a-z-]+(?: \d+)?)(?:, fails on (?P<fails>[\d.,\- ]+))?"
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job, what happens to it, and the trace that was reviewed."""

    head: str
    """Everything above the rule, as it was written."""
    job: Job
    cues: tuple[Cue, ...]
    trace: str

    def run(self) -> str:
        """Run it; return the trace. Raises Violation, also if a cue never comes up."""
        adversary, trace = Scripted(self.cues), Trace(self.job.shards)
        play(self.job, adversary, observers=(trace,))
        adversary.require_done()
        return trace.text()

    def rewritten(self) -> str:
        """Return the file's text with the trace of a run."""
        return f"{self.head}\n{_RULE}\n{self.run()}\n"


def parse(text: str) -> Scenario:
    """Read a scenario; raises ValueError that names the line."""
    head, _, trace = text.partition(f"\n{_RULE}\n")
    job, cues = Job(), []
    for line in head.splitlines():
        if line.startswith("job:"):
            job = Job.parse(line.removeprefix("job:"))
        elif line.strip() and not line.startswith("#"):
            cues.append(_cue(line, job))
    return Scenario(head, job, tuple(cues), trace.rstrip("\n"))


def _cue(line: str, job: Job) -> Cue:
    found = _CUE.fullmatch(line.strip())
    if found is None:
        raise ValueError(f"not a cue: {line!r}")
    epoch, fails = found["epoch"], found["fails"]
    return Cue(
        step=int(found["step"]),
        epoch=int(epoch) if epoch else None,
        move=found["move"],
        point=found["point"],
        unlucky=_places(fails, job.shards) if fails else None,
    )


def _places(text: str, shards: int) -> frozenset[Place]:
    places = set[Place]()
    for part in re.split(r"[ ,]+", text.strip()):
        if "." in part:
            replica, shard = part.split(".")
            places.add(Place(int(replica), int(shard)))
        else:
            first, _, last = part.partition("-")
            replicas = range(int(first), int(last or first) + 1)
            places |= {Place(r, s) for r in replicas for s in range(shards)}
    return frozenset(places)
