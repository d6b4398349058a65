"""Traces as contenders would leave them on a machine whose times are known exactly.

A step takes G t_c + T_r on a clock that starts at zero. What a failure adds is a literal here, so
that tests know every number that an experiment should find.
"""

from dataclasses import asdict, dataclass, replace

from recover.evaluation.contender import Commit, Moment, Task, Trace
from recover.evaluation.experiments.protocol import Job, Run, Traces
from recover.evaluation.experiments.scaling import Ranks

TOKENS = 100
"""Of a microbatch."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds."""

    microbatch: float = 0.1
    all_reduce: float = 0.2
    recovery: float = 0.5
    save: float = 0.25
    exit: float = 1.0
    start: float = 3.0
    load: float = 0.75
    detection: float = 5.0
    """Of torchft, which then throws the step away."""


TIMES = Times()


def loss(task: Task, step: int, *, microbatches: int) -> float:
    """Return a loss that depends on the seed and on the microbatches, if they are fewer."""
    missing = 1 - microbatches / task.microbatches
    return 5.0 - 0.01 * step + 0.03 * task.seed + 0.1 * missing


def trace(contender: str, task: Task, times: Times = TIMES) -> Trace:
    """Return what a contender would leave of a task."""
    if contender == "reference":  # is never killed and saves nothing
        task = replace(task, kills=(), checkpoint_every=0)
    settings = asdict(task) | {"kills": [asdict(kill) for kill in task.kills]}
    play = _Play(contender, task, times)
    play.run()
    return Trace(contender, tuple(play.commits), tuple(play.moments), settings)


def traces(plan: dict[str, Run]) -> Traces:
    """Return a trace for every run of a plan."""
    return {name: of(run) for name, run in plan.items()}


def of(run: Run) -> Trace:
    """Return the trace of a run."""
    if isinstance(run, Ranks):
        return ranks(run)
    assert isinstance(run, Job)
    return trace(run.contender, run.task)


def ranks(run: Ranks) -> Trace:
    """Return times that grow with log2 n (agreement), or with n (all others)."""
    n = run.ranks
    spans = {"agreement": 1e-3 * n.bit_length(), "noticing": 1e-2 + 1e-3 * n}
    spans |= {"shrink": 2e-2 + 1e-3 * n, "census": 1e-3 * n, "recovery": 4e-2 + 3e-3 * n}
    moments = [
        Moment(name, 0.0, event, {"ranks": n - event, "seconds": seconds})
        for name, seconds in spans.items()
        for event in range(1 if name == "agreement" else run.kills)
    ]
    return Trace("ranks", (), tuple(moments), {"ranks": n, "round": run.round, "replicas": n})


class _Play:
    def __init__(self, contender: str, task: Task, times: Times) -> None:
        self.contender, self.task, self.times = contender, task, times
        self.commits: list[Commit] = []
        self.moments: list[Moment] = []
        self.now, self.alive, self.reached = 0.0, task.replicas, -1
        self.kills = {k.step: k for k in task.kills}

    def run(self) -> None:
        step = saved = 0
        while step < self.task.steps:
            self.now += self.accumulation * self.times.microbatch + self.times.all_reduce
            if step in self.kills:
                self.mark("failure", step)
                del self.kills[step]
                if self.contender == "checkpoint":
                    step = self.restart(saved)
                    continue
                self.survive()
            self.commit(step)
            step += 1
            every = self.task.checkpoint_every
            due = every and step % every == 0 and step < self.task.steps
            if self.contender == "checkpoint" and due and step > saved:
                self.mark("save_begin", step)
                self.now += self.times.save
                self.mark("save_end", step)
                saved = step

    @property
    def microbatches(self) -> int:
        full = self.contender in ("reference", "recover", "checkpoint")
        return self.task.microbatches if full else self.alive * self.task.accumulation

    @property
    def accumulation(self) -> int:
        return -(-self.microbatches // self.alive)

    def mark(self, name: str, step: int | None = None) -> None:
        self.moments.append(Moment(name, self.now, step))

    def survive(self) -> None:
        self.alive -= 1
        if self.contender == "torchft":
            self.now += self.times.detection
            self.now += self.accumulation * self.times.microbatch + self.times.all_reduce
            return
        self.now += self.times.recovery
        self.moments.append(Moment("recovered", self.now, None, {"extra_s": 0.1}))

    def restart(self, saved: int) -> int:
        self.now += self.times.exit
        self.mark("exit")
        self.now += self.times.start
        self.mark("load_begin")
        self.now += self.times.load
        self.mark("load_end")
        self.mark("resumed", saved)
        return saved

    def commit(self, step: int) -> None:
        count = self.microbatches
        found = loss(self.task, step, microbatches=count)
        rerun = step <= self.reached
        self.commits.append(Commit(step, found, count, count * TOKENS, self.alive, self.now, rerun))
        self.reached = max(self.reached, step)
