"""Numbers out of traces, as the paper defines them. Layer: evaluation; pure. Paper: A.1."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from recover.evaluation.contender import Commit, Trace


@dataclass(frozen=True, slots=True)
class Paced:
    """A commit and the seconds since the one before it."""

    commit: Commit
    seconds: float
    hit: bool
    """Whether a replica was killed meanwhile."""

    @property
    def rate(self) -> float:
        """Tokens per second and device that was alive at the commit."""
        return self.commit.tokens / (self.seconds * self.commit.devices)

    @property
    def accumulation(self) -> int:
        """G: microbatches of the replica that runs most."""
        return -(-self.commit.microbatches // self.commit.devices)


def paced(trace: Trace) -> list[Paced]:
    """Return every commit but the first, which includes the start, with its pace."""
    killed = trace.times("failure")
    pairs = zip(trace.commits[:-1], trace.commits[1:], strict=True)
    return [
        Paced(after, after.time - before.time, any(before.time < t <= after.time for t in killed))
        for before, after in pairs
    ]


def undisturbed_step_s(trace: Trace, failures: int = 0) -> float:
    """Return the median time of a step after so many failures; no save and no rerun is in it."""
    saves, killed = trace.times("save_begin"), trace.times("failure")
    usual = [
        step.seconds
        for step in paced(trace)
        if sum(time < step.commit.time for time in killed) == failures
        if not step.hit and not step.commit.rerun
        if not any(step.commit.time - step.seconds <= s <= step.commit.time for s in saves)
    ]
    if not usual:
        raise ValueError(f"{trace.contender}: no undisturbed step after {failures} failures")
    return statistics.median(usual)


@dataclass(frozen=True, slots=True)
class Interval:
    """The time from one failure to the next; the last one ends with the run."""

    seconds: float
    tokens: int
    """Of steps that had not been committed before: what a rerun repeats counts once."""
    devices: int
    """Alive at its end."""

    @property
    def rate(self) -> float:
        """Effective throughput: processed tokens / (runtime x alive devices)."""
        return self.tokens / (self.seconds * self.devices)


def intervals(trace: Trace) -> list[Interval]:
    """Return the interval after each failure (paper A.1, Metric Definitions)."""
    begins = trace.times("failure")
    ends = (*begins[1:], trace.commits[-1].time)
    found = []
    for begin, end in zip(begins, ends, strict=True):
        inside = [commit for commit in trace.commits if begin < commit.time <= end]
        if not inside:
            raise ValueError(f"{trace.contender}: nothing was committed between two failures")
        tokens = sum(commit.tokens for commit in inside if not commit.rerun)
        found.append(Interval(end - begin, tokens, inside[-1].devices))
    return found


def failure_costs(trace: Trace) -> list[float]:
    """Return what each failure cost in seconds of wall time.

    From the last commit before the kill to the first commit of a step that had not been committed,
    less an undisturbed step since the failure before. That later steps are slower where survivors
    do more, or poorer where they do not, is not in it.
    """
    costs = []
    for failures, killed in enumerate(trace.times("failure")):
        usual = undisturbed_step_s(trace, failures)
        done = [commit for commit in trace.commits if commit.time <= killed]
        reached = max(commit.step for commit in done)
        further = (c.time for c in trace.commits if c.time > killed and c.step > reached)
        if (beyond := next(further, None)) is not None:
            costs.append(beyond - done[-1].time - usual)
    return costs


@dataclass(frozen=True, slots=True)
class Account:
    """What had been spent and got when a step was committed, counted from the first commit."""

    device_s: float
    seconds: float
    tokens: int


def accounts(trace: Trace) -> list[Account]:
    """Return device time against tokens, commit by commit; what is rerun counts once.

    A killed device counts up to its death where the run goes on without it, and throughout where
    another takes its place: that one waits for the restart as all others do.
    """
    first = trace.commits[0]
    points = [Account(0.0, 0.0, 0)]
    device_s, tokens, alive, now = 0.0, 0, first.devices, first.time
    for commit in trace.commits[1:]:
        for killed in trace.times("failure"):
            if now < killed <= commit.time:
                device_s += alive * (killed - now)
                now, alive = killed, commit.devices
        device_s += alive * (commit.time - now)
        now, alive = commit.time, commit.devices
        tokens += 0 if commit.rerun else commit.tokens
        points.append(Account(device_s, now - first.time, tokens))
    return points


def tokens_at(points: Sequence[Account], device_s: float) -> int:
    """Return the tokens of the last commit within a budget of device time."""
    return max((point.tokens for point in points if point.device_s <= device_s), default=0)


@dataclass(frozen=True, slots=True)
class Line:
    """The least-squares line intercept + slope x."""

    intercept: float
    slope: float

    @property
    def told(self) -> str:
        """Return intercept and slope; the name of x goes behind them."""
        return f"{self.intercept:.3g} {'-' if self.slope < 0 else '+'} {abs(self.slope):.3g}"

    def at(self, x: float) -> float:
        """Return the line's value."""
        return self.intercept + self.slope * x


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit a line; the xs must differ."""
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    if not spread:
        raise ValueError(f"a line needs two different x values, got {list(xs)}")
    pairs = list(zip(xs, ys, strict=True))
    slope = sum((x - x_mean) * (y - y_mean) for x, y in pairs) / spread
    intercept = y_mean - slope * x_mean
    return Line(intercept, slope)


def percent(value: float, of: float) -> float:
    """Return by how many percent ``value`` is larger than ``of``."""
    return 100 * (value / of - 1)
