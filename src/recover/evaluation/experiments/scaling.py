"""How recovery grows with the number of ranks on this machine. Layer: evaluation."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recover.errors import RecoverError
from recover.evaluation.contender import Commit, Moment, Trace
from recover.evaluation.experiments import measures
from recover.evaluation.experiments.protocol import (
    Row,
    Run,
    Size,
    Traces,
    column,
    distinct,
    number,
    those,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = Path(__file__).with_name("scaling_ranks.py")
TIMES = ("agreement", "noticing", "shrink", "census", "recovery")
KILLS = 3
"""Of a run, and no more than half of its ranks."""
LAUNCH = "from recover.cli import app; app()"


@dataclass(frozen=True, slots=True)
class Ranks:
    """A run of ranks that do nothing but agree, die and repair."""

    ranks: int
    kills: int
    agreements: int
    round: int

    @property
    def key(self) -> str:
        """All of its settings."""
        return f"ranks-{self.ranks}-{self.kills}-{self.agreements}-{self.round}"

    @property
    def steps(self) -> int:
        """Nothing is committed."""
        return 0

    @property
    def optional(self) -> bool:
        """It needs nothing that may be missing."""
        return False

    @property
    def estimate_s(self) -> float:
        """Two cores start two ranks in about a second."""
        return 3.0 + 0.5 * self.ranks

    def perform(
        self, out: Path, *, deadline_s: float, on_commit: Callable[[Commit], None]
    ) -> Trace:
        """Start the ranks with the product's launcher and read what each of them left."""
        told = {"kills": self.kills, "agreements": self.agreements}
        command = [sys.executable, "-c", LAUNCH, "run", "--replicas", str(self.ranks)]
        command += ["--out", str(out / "run"), str(RANKS), json.dumps(told)]
        out.mkdir(parents=True, exist_ok=True)
        with (out / "said.txt").open("wb") as said:
            try:
                status = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=deadline_s
                ).returncode
            except subprocess.TimeoutExpired:  # the launcher is dead, and with it the job
                raise RecoverError(
                    f"{self.ranks} ranks did not end within {deadline_s:.0f} s; see {out}"
                ) from None
        if status:
            raise RecoverError(f"{self.ranks} ranks ended with status {status}; see {out}")
        return trace_of(
            out / "run", {"ranks": self.ranks, **told, "round": self.round, "replicas": self.ranks}
        )


def trace_of(out: Path, settings: Mapping[str, object]) -> Trace:
    """Turn what the ranks left into moments: of each event, what the slowest rank says."""
    said: dict[tuple[str, int, int], list[float]] = {}
    for file in sorted(out.glob("times-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            said.setdefault((line["name"], line["ranks"], line["event"]), []).append(
                line["seconds"]
            )
    moments = [
        Moment(name, 0.0, event, {"ranks": ranks, "seconds": max(seconds)})
        for (name, ranks, event), seconds in sorted(said.items())
    ]
    return Trace("ranks", (), tuple(moments), settings)


class Scaling:
    """Times of agreement, shrink, census and recovery for 2 to 64 ranks."""

    name = "scaling"
    title = "Recovery and the number of ranks"
    paper = ""
    explanation = (
        "Ranks that load MPI but no torch agree, lose one of them by SIGKILL in an agreement, and "
        "repair; all on this machine, so that with more ranks than cores every message waits for "
        "the scheduler: growth here is an upper bound for that of a cluster with a core per rank. "
        "Agreement: the mean of many without a failure. Noticing: SIGKILL until the agreement has "
        "failed. Shrink: revocation, 10 ms in which deaths that come together come to light, "
        "MPIX_Comm_shrink and an agreement. Recovery: SIGKILL until the survivors have agreed on "
        "the new membership. Of each event the slowest survivor counts; medians over events."
    )
    full = Size(replicas=64, seeds=3)
    quick = Size(replicas=4, failures=1, seeds=1)

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Plan powers of two up to the number of replicas."""
        if size.replicas < 4:
            raise ValueError(f"--replicas must be at least 4 for a growth, got {size.replicas}")
        kills = KILLS if size.failures is None else size.failures
        agreements = 200 if size.seeds > 1 else 20
        powers = [2**i for i in range(1, size.replicas.bit_length()) if 2**i <= size.replicas]
        return {
            f"{ranks} ranks, round {place}": Ranks(ranks, min(kills, ranks // 2), agreements, place)
            for place in range(size.seeds)
            for ranks in powers
        }

    def rows(self, traces: Traces) -> list[Row]:
        """Return one row per event; ``ranks`` are those before it."""
        return [
            {
                "started": int(str(trace.settings["ranks"])),
                "round": int(str(trace.settings["round"])),
                "what": moment.name,
                "ranks": int(moment.facts["ranks"]),
                "ms": 1000 * float(moment.facts["seconds"]),
            }
            for trace in traces.values()
            for moment in trace.moments
        ]

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return medians in milliseconds per number of ranks started."""
        return [
            {"ranks": started}
            | {
                f"{what}, ms": statistics.median(column(mine, "ms"))
                for what in TIMES
                if (mine := those(rows, started=started, what=what))
            }
            for started in sorted(distinct(rows, "started"), key=lambda cell: int(str(cell)))
        ]

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return nothing: the paper has no such table."""
        return []

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Say for each time which growth fits best, and how far off all of them are."""
        said = []
        for what in TIMES:
            best, *others = growth(*medians(rows, what))
            rest = ", ".join(f"{fit.form}: {100 * fit.off:.0f} %" for fit in others)
            said.append(
                f"{what.capitalize()}: {best.told} ms, off by {100 * best.off:.0f} % on average "
                f"({rest})."
            )
        return said

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw medians and the fit that is best on two logarithmic axes."""
        from recover.evaluation import figures

        axes = figure.subplots()
        shades = (figures.GREY, figures.GREEN, figures.ORANGE, figures.PURPLE, figures.BLUE)
        least: list[float] = []
        for what, shade in zip(TIMES, shades, strict=True):
            ranks, ms = medians(rows, what)
            best, *_ = growth(ranks, ms)
            axes.plot(ranks, ms, "o", color=shade, markersize=5, label=f"{what}: {best.told}")
            between = [ranks[0] * (ranks[-1] / ranks[0]) ** (i / 100) for i in range(101)]
            fitted = [at if (at := best.at(n)) > 0 else math.nan for n in between]
            axes.plot(between, fitted, color=shade, linewidth=1, alpha=0.7)
            least.append(min(ms))
        axes.set_xscale("log", base=2)
        figures.plain_log(axes)
        axes.set_ylim(bottom=min(least) / 2)  # a fit may fall through zero
        sizes = medians(rows, TIMES[0])[0]
        axes.set_xticks(sizes, [f"{n:.0f}" for n in sizes])
        axes.set_xlabel("ranks on this machine")
        axes.set_ylabel("milliseconds (medians; lines: best fits)")
        figures.legend(figure, axes)


@dataclass(frozen=True, slots=True)
class Fit:
    """A time in milliseconds as a function of the number of ranks n."""

    form: str
    told: str
    """The form with its numbers."""
    at: Callable[[float], float]
    off: float
    """Mean of abs(fit / measured - 1)."""


def growth(ranks: Sequence[float], ms: Sequence[float]) -> list[Fit]:
    """Fit logarithmic, linear and power-law growth by least squares; the least off comes first."""
    slow = measures.fit([math.log2(n) for n in ranks], ms)
    straight = measures.fit(ranks, ms)
    power = measures.fit([math.log2(n) for n in ranks], [math.log2(one) for one in ms])
    factor, exponent = 2**power.intercept, power.slope
    forms: list[tuple[str, str, Callable[[float], float]]] = [
        ("a + b log2 n", f"{slow.told} log2 n", lambda n: slow.at(math.log2(n))),
        ("a + b n", f"{straight.told} n", straight.at),
        ("a n^b", f"{factor:.3g} n^{exponent:.2f}", lambda n: factor * n**exponent),
    ]
    points = list(zip(ranks, ms, strict=True))
    fits = [
        Fit(form, told, at, statistics.fmean(abs(at(n) / one - 1) for n, one in points))
        for form, told, at in forms
    ]
    return sorted(fits, key=lambda fit: fit.off)


def medians(rows: Sequence[Row], what: str) -> tuple[list[float], list[float]]:
    """Return ranks and median milliseconds of one time."""
    mine = those(rows, what=what)
    started = sorted({number(row, "started") for row in mine})
    return started, [
        statistics.median(column(those(mine, started=int(ranks)), "ms")) for ranks in started
    ]
