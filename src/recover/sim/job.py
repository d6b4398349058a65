"""A virtual training job: its description, its program, and one checked run of it. Layer: sim."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from recover.core.data import DataLedger, ExactLedger, StreamLedger
from recover.core.guard import Member
from recover.core.iteration import JobState, Rules, finish, iteration, start
from recover.core.mesh import Mesh, Place
from recover.core.policies import AdaptiveWorldPolicy, Policy, RestoreChoice, StaticWorldPolicy
from recover.sim.adversary import Adversary, sparse
from recover.sim.checkers import Referee
from recover.sim.gradients import Memory, Symbol, Violation, counted, digits
from recover.sim.moves import Budget
from recover.sim.observer import Observer
from recover.sim.ranks import Program
from recover.sim.rulebook import Rulebook
from recover.sim.world import World

States = tuple[JobState, ...]
"""What a rank knew after the start, after each step, and at the end."""


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about a run but the adversary's picks. Its text is ``key=value`` pairs."""

    replicas: int = 4
    shards: int = 1
    microbatches: int = 8
    buckets: int = 2
    steps: int = 1
    policy: str = "static"
    data: str = "exact"
    restore: str = "auto"
    memory: str = "in_place"
    """``spoiled``: in place, and a shrink makes undefined what was reduced before it."""
    gradients: str = "digits"
    start: int = 0
    """1: begin with the copy of the initial parameters."""
    finish: int = 1
    """1: end with the agreement that everybody is done."""
    kills: int = 0
    excludes: int = 0
    glitches: int = 0
    every_point: int = 0

    def __post_init__(self) -> None:
        for key, allowed in _WORDS.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {allowed}, got {getattr(self, key)!r}")
        if min(self.buckets, self.steps) < 1:
            raise ValueError(f"buckets and steps must be at least 1: {self}")
        self.mesh()
        self.rules()

    def __str__(self) -> str:
        return " ".join(
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name in _ALWAYS or getattr(self, f.name) != f.default
        )

    @classmethod
    def parse(cls, text: str) -> "Job":
        """Read ``key=value`` pairs; raises ValueError."""
        job = cls()
        types = {f.name: int if isinstance(f.default, int) else str for f in fields(cls)}
        values: dict[str, Any] = {}
        for pair in text.split():
            key, _, value = pair.partition("=")
            if key not in types:
                raise ValueError(f"unknown key {key!r}; there are {', '.join(types)}")
            values[key] = types[key](value)
        return replace(job, **values)

    def mesh(self) -> Mesh:
        """Return the shape."""
        return Mesh(self.replicas, self.shards)

    def rules(self) -> Rules:
        """Return the core's rules."""
        policy: Policy = StaticWorldPolicy(self.microbatches)
        if self.policy == "adaptive":
            policy = AdaptiveWorldPolicy(self.microbatches, self.replicas)
        return Rules(policy, RestoreChoice(self.restore))

    def state(self) -> JobState:
        """Return the state that the job begins with."""
        exact = self.data == "exact"
        data: DataLedger = ExactLedger() if exact else StreamLedger.start(self.replicas)
        return JobState(self.mesh().everyone(), data)

    def budget(self) -> Budget:
        """Return what the adversary may do."""
        return Budget(self.kills, self.excludes, self.glitches, bool(self.every_point))

    def symbol(self) -> Symbol:
        """Return the form of the gradients."""
        return digits if self.gradients == "digits" else counted

    def memory_of(self, place: Place) -> Memory:
        """Return a rank's buckets, which hold its own initial parameters."""
        memory = Memory(self.buckets, self.symbol(), in_place=self.memory != "out_of_place")
        memory.load(self.symbol()(place.replica))
        return memory

    def referee(self) -> Referee:
        """Return a referee for one run."""
        rules = Rulebook(self.microbatches, self.replicas, self.policy == "adaptive")
        exact = self.data == "exact"
        return Referee(rules, shards=self.shards, exact=exact, symbol=self.symbol())


_WORDS = {
    "policy": ("static", "adaptive"),
    "data": ("exact", "stream"),
    "restore": tuple(RestoreChoice),
    "memory": ("in_place", "out_of_place", "spoiled"),
    "gradients": ("digits", "counted"),
}
_ALWAYS = ("replicas", "microbatches")


def training(job: Job) -> Program[States]:
    """Return the program of a training job: start, the steps, finish."""

    async def program(member: Member) -> States:
        rules, state = job.rules(), job.state()
        if job.start:
            state = await start(member, state)
        states: States = (state,)
        while state.step < job.steps:
            state = await iteration(member, rules, state)
            states = (*states, state)
        return (*states, await finish(member, state)) if job.finish else states

    return program


def play(
    job: Job,
    adversary: Adversary,
    *,
    observers: Sequence[Observer] = (),
    before_meeting: Callable[[World[States]], None] | None = None,
    program: Program[States] | None = None,
) -> dict[Place, States]:
    """Run a job under the eyes of a referee; raise Violation where a rule is broken."""
    referee = job.referee()
    world = World(
        job.mesh(),
        program or training(job),
        adversary,
        memory=job.memory_of,
        observers=(referee, *observers),
        before_meeting=before_meeting,
        patience=_patience(job),
        spoil=job.memory == "spoiled",
    )
    results = world.run()
    referee.close_run(results.keys())
    if len({repr(states) for states in results.values()}) != 1:
        raise Violation("the survivors disagree about the state")
    if any(states[-1].step != job.steps for states in results.values()):
        raise Violation("the job ended before its last step")
    return results


def replay(job: Job, picks: dict[int, int], *observers: Observer) -> dict[Place, States]:
    """Run a job again with the picks of an earlier run."""
    return play(job, sparse(picks, job.budget()), observers=observers)


def _patience(job: Job) -> int:
    """Return how many turns a job can take: each strike costs one more pass of everything."""
    strikes = job.replicas * job.shards + job.excludes + min(job.glitches, 100)
    per_pass = 2 * job.buckets * job.shards + 6 + job.replicas * job.shards
    return (job.steps + 2 + 2 * strikes) * per_pass


def command(job: Job, picks: dict[int, int]) -> str:
    """Return the command line that shows this run again."""
    moves = ",".join(f"{position}:{pick}" for position, pick in picks.items())
    return f"python -m recover.sim --replay '{job}" + (f" @ {moves}'" if moves else "'")


def parse_replay(text: str) -> tuple[Job, dict[int, int]]:
    """Read what ``--replay`` takes; raises ValueError."""
    shape, _, moves = text.partition("@")
    pairs = (pair.split(":") for pair in moves.strip().split(",") if pair.strip())
    return Job.parse(shape), {int(position): int(pick) for position, pick in pairs}
