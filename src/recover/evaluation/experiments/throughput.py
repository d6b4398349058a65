"""What a step costs while replicas are lost. Layer: evaluation. Paper: Figures 7b, 9b, 4.2."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recover.evaluation.experiments import measures, paper
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
from recover.evaluation.experiments.trajectory import Trajectory, half_lost, task_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEFORE, BETWEEN, AFTER = "before the first failure", "between failures 1 and 2", "after the last"
HIT = "failure steps"
TOLD = ("reference, tokens/s/replica", "ReCoVer, tokens/s/replica", "change, %")
"""What is told of each phase."""


class Throughput:
    """Tokens per second and surviving replica at every step, from the runs of ``trajectory``."""

    name = "throughput"
    title = "Effective throughput at every step"
    paper = "Figures 7b and 9b"
    explanation = (
        "Tokens of a step, divided by the time since the commit before it and by the replicas that "
        "are alive. The first step is left out, since it includes the start; phases are averaged "
        "as in the paper, without the steps in which a replica was killed. The runs are those of "
        "`trajectory`. The model is T = G s / (G t_c + T_r): t_c and T_r are fitted to the median "
        "step times of the first half of the world sizes and predict the other half."
    )
    full = Trajectory.full
    quick = Trajectory.quick

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Plan two of the runs of the trajectory."""
        return {
            "reference": Job("reference", task_of(size, size.seed, ())),
            "static": Job("recover", task_of(size, size.seed, half_lost(size))),
        }

    def rows(self, traces: Traces) -> list[Row]:
        """Return one row per run and step."""
        return [
            {
                "run": name,
                "step": step.commit.step,
                "seconds": step.seconds,
                "replicas": step.commit.devices,
                "accumulation": step.accumulation,
                "tokens": step.commit.tokens,
                "rate": step.rate,
                "failure": int(step.hit),
            }
            for name, trace in traces.items()
            for step in measures.paced(trace)
        ]

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return one line per phase, as the paper's table."""
        reference, static = those(rows, run="reference"), those(rows, run="static")
        lines: list[Row] = []
        for phase, steps in phases(static).items():
            if not steps:
                continue
            rates = column([row for row in static if number(row, "step") in steps], "rate")
            usual = column([row for row in reference if number(row, "step") in steps], "rate")
            mean, undisturbed = statistics.fmean(rates), statistics.fmean(usual)
            told = (undisturbed, mean, measures.percent(mean, undisturbed))
            lines.append(
                {
                    "phase": phase,
                    "steps": len(steps),
                    **dict(zip(TOLD, told, strict=True)),
                    "slowest step": min(rates),
                    "fastest step": max(rates),
                }
            )
        return lines

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return the change against the reference in each phase."""
        ours = {line["phase"]: line for line in self.table(rows)}
        return [
            {
                "phase": phase,
                "paper: reference, tokens/s/GPU": reference,
                "paper: ReCoVer": recover,
                "paper: change, %": measures.percent(recover, reference),
                **{f"ours: {name}": ours[phase][name] if phase in ours else None for name in TOLD},
            }
            for phase, (reference, recover) in zip(
                (BEFORE, BETWEEN, AFTER), paper.PHASES, strict=True
            )
        ]

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Say what the model predicts and how far that is off."""
        model = fit_model(rows)
        if model is None:
            return ["Too few world sizes for the model T = G s / (G t_c + T_r)."]
        said = "; ".join(
            f"G = {p.accumulation}: {p.predicted_s:.3f} s predicted, {p.measured_s:.3f} s measured "
            f"({measures.percent(p.predicted_s, p.measured_s):+.1f} %)"
            for p in model.predictions
        )
        return [
            f"Fitted to {model.fitted_worlds} world sizes: t_c = {1000 * model.line.slope:.1f} ms "
            f"and T_r = {1000 * model.line.intercept:.0f} ms.",
            f"Step times at the others: {said}.",
        ]

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw rates step by step; failure steps are marked."""
        from recover.evaluation import figures

        axes = figure.subplots()
        for name in distinct(rows, "run"):
            run = those(rows, run=name)
            label = "ReCoVer" if name == "static" else name
            look = figures.style(str(name)) | {"linewidth": 1.4}
            axes.plot(column(run, "step"), column(run, "rate"), label=label, **look)
        hits = those(rows, run="static", failure=1)
        axes.plot(
            column(hits, "step"),
            column(hits, "rate"),
            "o",
            color=figures.RED,
            markersize=5,
            label="step with a kill",
        )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("tokens per second and surviving replica")
        axes.set_ylim(bottom=0)
        figures.legend(figure, axes)


def phases(static: Sequence[Row]) -> dict[str, set[int]]:
    """Return the steps of each phase of a run."""
    hits = [int(number(row, "step")) for row in static if row["failure"]]
    steps = {int(number(row, "step")) for row in static}
    if not hits:
        return {BEFORE: steps}
    second = hits[1] if len(hits) > 1 else max(steps) + 1
    return {
        BEFORE: {step for step in steps if step < hits[0]},
        BETWEEN: {step for step in steps if hits[0] < step < second},
        AFTER: {step for step in steps if step > hits[-1]},
        HIT: set(hits),
    }


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step time that the model was not fitted to."""

    accumulation: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """Step time G t_c + T_r: the slope is t_c, the intercept T_r."""

    line: measures.Line
    fitted_worlds: int
    predictions: tuple[Prediction, ...]


def fit_model(rows: Sequence[Row]) -> Model | None:
    """Fit the model to the first half of the world sizes; None where there are too few."""
    calm = [row for row in those(rows, run="static") if not row["failure"]]
    points = []
    for replicas in distinct(calm, "replicas"):
        world = those(calm, replicas=replicas)
        accumulation = int(statistics.median(column(world, "accumulation")))
        points.append((accumulation, statistics.median(column(world, "seconds"))))
    half = max(2, (len(points) + 1) // 2)
    if len(points) <= half or len({g for g, _ in points[:half]}) < 2:
        return None
    line = measures.fit([g for g, _ in points[:half]], [seconds for _, seconds in points[:half]])
    predictions = tuple(Prediction(g, line.at(g), seconds) for g, seconds in points[half:])
    return Model(line, half, predictions)
