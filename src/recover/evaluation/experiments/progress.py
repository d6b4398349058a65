"""Tokens against device-hours. Layer: evaluation. Paper: Figures 8b, 10b."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recover.evaluation.experiments import measures, paper
from recover.evaluation.experiments.failures import CONTENDERS, Failures, settings
from recover.evaluation.experiments.protocol import (
    Job,
    Row,
    Run,
    Size,
    Traces,
    column,
    number,
    those,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = 5
"""Lines of the table."""


class Progress:
    """Tokens processed for the device time spent, from the runs of ``failures``."""

    name = "progress"
    title = "Tokens processed against device-hours spent"
    paper = "Figures 8b and 10b"
    explanation = (
        "From the first setting of `failures`, no further run. Device time counts from the first "
        "commit: every replica from then on, waiting for a restart included; a killed one up to "
        "its death where nobody takes its place. Tokens are those of committed steps; what is "
        "rerun counts once. Both contenders make the same steps, so ReCoVer's line ends earlier."
    )
    full = Failures.full
    quick = Failures.quick

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Plan the first setting of ``failures``."""
        task = settings(size)[0].task
        return {contender: Job(contender, task) for contender in CONTENDERS}

    def rows(self, traces: Traces) -> list[Row]:
        """Return one row per contender and commit."""
        return [
            {
                "contender": name,
                "device hours": point.device_s / 3600,
                "seconds": point.seconds,
                "tokens": point.tokens,
            }
            for name, trace in traces.items()
            for point in measures.accounts(trace)
        ]

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return what both had processed at fifths of the device time that ReCoVer needed."""
        budget = number(those(rows, contender="recover")[-1], "device hours")
        lines: list[Row] = []
        for part in range(1, PARTS + 1):
            hours = budget * part / PARTS
            theirs, ours = (_tokens(rows, who, hours) for who in CONTENDERS)
            lines.append(
                {
                    "device hours": hours,
                    "checkpoint-restart, tokens": theirs,
                    "ReCoVer, tokens": ours,
                    "more, %": measures.percent(ours, theirs) if theirs else None,
                }
            )
        return lines

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return the advantage at five points: the paper's, and fifths of our device time."""
        return [
            {
                "paper: GPU-hours": hours,
                "paper: checkpoint-restart, M tokens": theirs,
                "paper: ReCoVer": recover,
                "paper: more, %": measures.percent(recover, theirs),
                "ours: device-hours": ours["device hours"],
                "ours: more, %": ours["more, %"],
            }
            for (hours, theirs, recover), ours in zip(paper.PROGRESS, self.table(rows), strict=True)
        ]

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Say the advantage at the end of ReCoVer's run, and the wall time of both."""
        last = self.table(rows)[-1]
        theirs, ours = (those(rows, contender=who)[-1] for who in CONTENDERS)
        more = last["more, %"]
        gain = f"{more:+.1f} % tokens" if isinstance(more, float) else "tokens where it has none"
        return [
            f"At {number(last, 'device hours'):.3f} device-hours ReCoVer had processed {gain} "
            "against checkpoint-restart (the paper: +74.9 % at 234 GPU-hours).",
            f"The same steps took checkpoint-restart {number(theirs, 'device hours'):.3f} "
            f"device-hours and {number(theirs, 'seconds'):.0f} s, ReCoVer "
            f"{number(ours, 'device hours'):.3f} and {number(ours, 'seconds'):.0f} s.",
        ]

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw both lines."""
        from recover.evaluation import figures

        axes = figure.subplots()
        for who, label in zip(CONTENDERS, ("checkpoint-restart", "ReCoVer"), strict=True):
            mine = those(rows, contender=who)
            tokens = [count / 1e6 for count in column(mine, "tokens")]
            axes.plot(
                column(mine, "device hours"),
                tokens,
                color=figures.colour(who),
                label=label,
                linewidth=1.6,
            )
        axes.set_xlabel("device-hours spent")
        axes.set_ylabel("tokens processed, millions")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        figures.legend(figure, axes)


def _tokens(rows: Sequence[Row], contender: str, hours: float) -> int:
    """Return the tokens of the last commit within a budget; the end of the budget included."""
    within = [
        int(number(row, "tokens"))
        for row in those(rows, contender=contender)
        if number(row, "device hours") <= hours * (1 + 1e-9)
    ]
    return max(within, default=0)
