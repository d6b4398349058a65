"""All schedules of a small job, and many seeds of larger ones. Layer: sim.

Exhaustive search runs every sequence of picks, each from the start, since coroutines cannot be
copied. A run is cut off where it reaches, with nothing decided yet, a state that an earlier run was
in: what can follow is then explored already. A state is all that the future depends on: each rank's
coroutine (its instruction pointers and local variables), its memory and groups, what the adversary
has left, and what the referee knows. States never recur within a run, because epochs and steps only
rise.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random

from recover.sim.adversary import EveryPick, Picking, SeededPicks
from recover.sim.gradients import Violation
from recover.sim.job import Job, States, command, play
from recover.sim.observer import Observer
from recover.sim.ranks import Program
from recover.sim.world import World


@dataclass(frozen=True, slots=True)
class Explored:
    """How far an exhaustive search went."""

    schedules: int
    """Runs, those that were cut off included."""
    finished: int
    """Runs to the end."""
    states: int
    """Different states in which the adversary had to decide."""


class _Known(Exception):
    """The run reached a state that an earlier run was in."""


def explore(
    job: Job,
    *,
    every_subset_up_to: int = 4,
    program: Program[States] | None = None,
    observers: Callable[[], Sequence[Observer]] = lambda: (),
    merge: bool = True,
    limit: int | None = None,
) -> Explored:
    """Run every schedule of ``job`` within its budget.

    ``every_subset_up_to``: in larger groups, those that see a disturbed collective fail are one
    rank, all but one, or all. ``observers`` makes those that watch one run. ``merge`` False
    switches the cutting off off. Raises Violation with the command that replays it.
    """
    picks, seen, known = EveryPick(), set[int](), dict[object, Hashable]()
    adversary = Picking(picks, job.budget(), every_subset_up_to=every_subset_up_to)

    def visit(world: World[States]) -> None:
        if merge and picks.on_new_ground:
            key = hash(world.key(known))
            if key in seen:
                raise _Known
            seen.add(key)

    schedules = finished = 0
    while picks.begin() and (limit is None or schedules < limit):
        schedules += 1
        try:
            play(job, adversary, observers=observers(), before_meeting=visit, program=program)
            finished += 1
        except _Known:
            pass
        except Violation as broken:
            how = f"{command(job, picks.taken)} --subsets {every_subset_up_to}"
            raise Violation(f"{broken}\nschedule {schedules}; replay: {how}") from broken
    return Explored(schedules, finished, len(seen))


def job_of_seed(seed: int) -> tuple[Job, Random, float]:
    """Return the job that a seed stands for, its numbers, and how often something happens."""
    random = Random(seed)
    replicas, shards = random.choice((2, 3, 4, 5, 6, 8, 11)), random.choice((1, 1, 2, 3))
    steps = random.randrange(1, 5)
    adaptive = random.random() < 0.15
    batch = random.randrange(replicas if adaptive else 1, 4 * replicas)
    job = Job(
        replicas=replicas,
        shards=shards,
        microbatches=batch,
        buckets=random.randrange(1, 5),
        steps=steps,
        policy="adaptive" if adaptive else "static",
        data=random.choice(("exact", "stream")),
        restore=random.choice(("auto", "blocking", "non_blocking")),
        memory=random.choice(("in_place", "in_place", "out_of_place")),
        gradients="digits" if batch * steps < 200 else "counted",
        start=random.randrange(2),
        kills=random.randrange(replicas),
        excludes=random.choice((0, 0, 1, 2)),
        glitches=random.choice((0, 0, 1, 3)),
        every_point=1,
    )
    return job, random, random.choice((0.003, 0.01, 0.03, 0.1, 0.3))


def run_seed(
    seed: int,
    *,
    observers: Callable[[Job], Sequence[Observer]] = lambda job: (),
    program: Callable[[Job], Program[States]] | None = None,
) -> tuple[Job, dict[int, int]]:
    """Run a seed; return its job and the picks that made a difference.

    The budget makes the two phases: while it lasts anything may happen, and when it is spent the
    job has to finish within a bounded number of turns. Raises Violation with the commands that
    replay it.
    """
    job, random, rate = job_of_seed(seed)
    picks = SeededPicks(random, rate)
    adversary = Picking(picks, job.budget())
    chosen = program(job) if program else None
    try:
        play(job, adversary, observers=observers(job), program=chosen)
    except Violation as broken:
        how = f"python -m recover.sim --seed {seed}\n or: {command(job, picks.taken)}"
        raise Violation(f"{broken}\nreplay: {how}") from broken
    return job, picks.taken
