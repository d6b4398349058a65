"""Does training stay on the failure-free trajectory? Layer: evaluation. Paper: Figures 7a, 9a."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recover.evaluation.contender import Kill, Task
from recover.evaluation.experiments import paper
from recover.evaluation.experiments.protocol import (
    Job,
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

LABELS = {"static": "ReCoVer", "adaptive": "adaptive (strawman)"}
FIRST_WINDOW = 5
"""Steps before the first window of the failures, so that there is a time before any failure."""


def half_lost(size: Size) -> tuple[Kill, ...]:
    """Return one kill per window, at a random step of it."""
    choose = random.Random(f"kills {size.seed}")
    victims = choose.sample(range(size.replicas), size.lost)
    window = window_of(size)
    return tuple(
        Kill(FIRST_WINDOW + place * window + choose.randrange(window), victim)
        for place, victim in enumerate(victims)
    )


def window_of(size: Size) -> int:
    """Return the steps of a window: those given, or five eighths of the run for all windows."""
    if size.intervals:
        return size.intervals[0]
    return max(1, size.steps * 5 // 8 // max(1, size.lost))


def task_of(size: Size, seed: int, kills: tuple[Kill, ...]) -> Task:
    """Return the training that all runs here share."""
    return Task(
        replicas=size.replicas,
        accumulation=size.accumulation,
        steps=size.steps,
        seed=seed,
        preset=size.preset,
        microbatch_ms=size.microbatch_ms,
        bandwidth_mbps=size.bandwidth_mbps,
        kills=kills,
    )


class Trajectory:
    """Loss of runs that lose half of their replicas, against the reference at the same step."""

    name = "trajectory"
    title = "Training trajectory"
    paper = "Figures 7a and 9a"
    explanation = (
        "Half of the replicas are killed over the run, one per window of fixed length at a random "
        "step of it, all inside gradient synchronisation. The difference is the loss of a step "
        "less that of the failure-free reference with the same seed at the same step. Other seeds "
        "of the reference (other initial parameters and another order of the text) show how far "
        "apart two healthy runs are. A gap in a line of the lower half: equal "
        "to the last bit."
    )
    full = Size(
        replicas=8,
        accumulation=4,
        steps=260,
        seeds=3,
        preset="nano",
        microbatch_ms=100.0,
        bandwidth_mbps=25.0,
    )
    quick = Size(
        replicas=2,
        accumulation=4,
        steps=16,
        seeds=2,
        preset="nano",
        microbatch_ms=10.0,
        bandwidth_mbps=100.0,
    )

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Plan the reference with every seed, ReCoVer and the adaptive strawman with the first."""
        last = FIRST_WINDOW + size.lost * window_of(size)
        if last > size.steps:
            raise ValueError(
                f"--steps must be at least {last} for these failures, got {size.steps}"
            )
        kills = half_lost(size)
        runs: dict[str, Run] = {
            "reference": Job("reference", task_of(size, size.seed, ())),
            "static": Job("recover", task_of(size, size.seed, kills)),
            "adaptive": Job("adaptive", task_of(size, size.seed, kills)),
        }
        for seed in range(size.seed + 1, size.seed + size.seeds):
            runs[f"reference, seed {seed}"] = Job("reference", task_of(size, seed, ()))
        return runs

    def rows(self, traces: Traces) -> list[Row]:
        """Return one row per run and step."""
        reference = {commit.step: commit.loss for commit in traces["reference"].commits}
        rows: list[Row] = []
        for name, trace in traces.items():
            hit = {moment.step for moment in trace.moments if moment.name == "failure"}
            rows += [
                {
                    "run": name,
                    "step": commit.step,
                    "loss": commit.loss,
                    "difference": commit.loss - reference[commit.step],
                    "microbatches": commit.microbatches,
                    "replicas": commit.devices,
                    "failures": int(commit.step in hit),
                }
                for commit in trace.commits
            ]
        return rows

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return one line per run: how far it is from the reference."""
        return [_summary(str(run), those(rows, run=run)) for run in distinct(rows, "run")]

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return losses at the paper's steps."""
        lines: list[Row] = []
        for step, (reference, recover) in paper.LOSSES.items():
            ours = {str(row["run"]): row for row in those(rows, step=step - 1)}
            lines.append(
                {
                    "step": step,
                    "paper: reference": f"{reference:.3f}",
                    "paper: ReCoVer": f"{recover:.3f}",
                    "paper: difference": recover - reference,
                    "ours: reference": _loss(ours["reference"]) if ours else None,
                    "ours: ReCoVer": _loss(ours["static"]) if ours else None,
                    "ours: difference": ours["static"]["difference"] if ours else None,
                }
            )
        return lines

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Say how far the runs are from the reference, and how far seeds are from each other."""
        lines = {str(line["run"]): line for line in self.table(rows)}
        seeds = [line for name, line in lines.items() if name.startswith("reference,")]
        killed = int(number(lines["static"], "killed"))
        said = [
            f"{killed} of {_first(rows, 'static')} replicas were killed in "
            f"{lines['static']['steps']} steps.",
            f"Loss less the reference's, absolute: ReCoVer {_distances(lines['static'])}, the "
            f"adaptive strawman {_distances(lines['adaptive'])} (the paper: 0.02 on average).",
        ]
        if seeds:
            noise = min(column(seeds, "mean |difference|"))
            said.append(f"Two seeds of the reference differ by {noise:.2g} or more on average.")
        return said

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw losses above, distances from the reference on a logarithmic axis below."""
        from recover.evaluation import figures

        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        hits = [number(row, "step") for row in those(rows, run="static", failures=1)]
        for name in distinct(rows, "run"):
            run = those(rows, run=name)
            steps, style = column(run, "step"), figures.style(str(name))
            label = LABELS.get(str(name), str(name))
            above.plot(steps, column(run, "loss"), label=label, **style)
            if name != "reference":
                distance = [abs(d) or math.nan for d in column(run, "difference")]
                below.plot(steps, distance, **style)
        for axes in (above, below):
            figures.mark_failures(axes, hits)
        above.set_ylabel("training loss")
        below.set_ylabel("|difference from\nthe reference|")
        figures.plain_log(below, decades_only=True)
        low, high = below.get_ylim()
        below.set_ylim(min(low, 1e-3), max(high, 1e-1))
        below.axhline(0.02, color="black", linewidth=0.8, linestyle="--")
        below.annotate(
            "the paper's\nmean: 0.02",
            (1.0, 0.02),
            (4, 0),
            xycoords=below.get_yaxis_transform(),
            textcoords="offset points",
            fontsize=7.5,
            va="center",
        )
        below.set_xlabel("optimizer step")
        figures.legend(figure, above)


def _summary(run: str, rows: Sequence[Row]) -> Row:
    distances = [abs(d) for d in column(rows, "difference")]
    return {
        "run": run,
        "steps": len(rows),
        "killed": int(number(rows[0], "replicas") - number(rows[-1], "replicas")),
        "microbatches at the end": rows[-1]["microbatches"],
        "mean |difference|": statistics.fmean(distances),
        "largest |difference|": max(distances),
        "last loss": rows[-1]["loss"],
    }


def _loss(row: Row) -> str:
    return f"{number(row, 'loss'):.3f}"


def _distances(line: Row) -> str:
    mean, largest = number(line, "mean |difference|"), number(line, "largest |difference|")
    return f"{mean:.2g} on average, {largest:.2g} at most"


def _first(rows: Sequence[Row], run: str) -> int:
    return int(number(those(rows, run=run)[0], "replicas"))
