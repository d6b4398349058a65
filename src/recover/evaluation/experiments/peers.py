"""ReCoVer beside torchrun with checkpoints and torchft, in turns. Layer: evaluation."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recover.evaluation.contender import Task, Trace
from recover.evaluation.experiments import measures
from recover.evaluation.experiments.failures import kills_every
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

LABELS = {
    "reference": "DDP, no failures",
    "recover": "ReCoVer",
    "checkpoint": "torchrun with checkpoints",
    "torchft": "torchft",
}


class Peers:
    """Steady-state cost and cost per failure, as ratios in one series of runs."""

    name = "peers"
    title = "Cost of being fault tolerant, and cost of a failure"
    paper = ""
    explanation = (
        "The same job and the same kills for each system, in turns, round after round with "
        "another seed. Steady state: the median time of a step before the first failure, divided "
        "by that of plain DDP in the same round; `with saves` adds a checkpoint's time divided by "
        "N. Cost of a failure: the time between the last commit before the kill and the first "
        "commit that is further, less an undisturbed step; detection, discarded or rerun work and "
        "extra microbatches are all in it. What each system "
        "keeps differs: torchrun starts a new replica in place of the dead one, the others go on "
        "with fewer; ReCoVer alone commits the step that was hit with all its microbatches."
    )
    full = Size(replicas=4, accumulation=4, intervals=(10,), seeds=3)
    quick = Size(replicas=2, accumulation=2, intervals=(4,), seeds=1)

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Plan round after round; the order changes, so that no system always comes first."""
        runs: dict[str, Run] = {}
        for place in range(size.seeds):
            task = _task(size, size.seed + place)
            order = list(LABELS)[place % len(LABELS) :] + list(LABELS)[: place % len(LABELS)]
            for who in order:
                runs[f"{place}: {who}"] = Job(who, task, optional=who == "torchft")
        return runs

    def rows(self, traces: Traces) -> list[Row]:
        """Return one row per round, system and failure; one without a failure for DDP."""
        rows: list[Row] = []
        for name, trace in traces.items():
            place, who = name.split(": ")
            usual = measures.undisturbed_step_s(traces[f"{place}: reference"])
            step = measures.undisturbed_step_s(trace)
            save = _save_s(trace) / max(1, int(str(trace.settings["checkpoint_every"])))
            costs: list[float | None] = [*measures.failure_costs(trace)]
            for cost in costs or [None]:
                rows.append(
                    {
                        "round": int(place),
                        "system": LABELS[who],
                        "step s": step,
                        "step / DDP": step / usual,
                        "with saves / DDP": (step + save) / usual,
                        "cost of a failure s": cost,
                    }
                )
        return rows

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return medians per system, and ratios of the failures' costs to ReCoVer's."""
        ours = statistics.median(_costs(rows, "ReCoVer"))
        lines: list[Row] = []
        for label in LABELS.values():
            if not (mine := those(rows, system=label)):
                continue
            costs = _costs(rows, label)
            median = statistics.median(costs) if costs else None
            lines.append(
                {
                    "system": label,
                    "step / DDP": _over_rounds(mine, "step / DDP"),
                    "with saves / DDP": _over_rounds(mine, "with saves / DDP"),
                    "failures": len(costs),
                    "cost of a failure, median s": median,
                    "least s": min(costs, default=None),
                    "most s": max(costs, default=None),
                    "ReCoVer = 1": None if median is None else median / ours,
                }
            )
        return lines

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return nothing: the paper has no such table."""
        return []

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Say the ratios."""
        said = []
        for line in self.table(rows):
            ratio = line["ReCoVer = 1"]
            if isinstance(ratio, float) and line["system"] != "ReCoVer":
                said.append(
                    f"A failure cost {line['system']} {ratio:.1f} times what it cost ReCoVer "
                    f"(median of {line['failures']})."
                )
        return said

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw steady state on the left and every failure's cost on the right."""
        from recover.evaluation import figures

        left, right = figure.subplots(1, 2)
        lines = self.table(rows)
        names = {label: who for who, label in LABELS.items()}
        for place, line in enumerate(lines):
            label = str(line["system"])
            shade = figures.colour(names[label])
            height = number(line, "with saves / DDP")
            left.bar(place, height, 0.6, color=shade)
            figures.name_bars(left, [place], [height], [f"{height:.2f}"])
            if line["cost of a failure, median s"] is None:
                continue
            costs = sorted(_costs(rows, label))
            spread = [place + 0.3 * (i / max(1, len(costs) - 1) - 0.5) for i in range(len(costs))]
            right.plot(spread, costs, "o", color=shade, markersize=4)
            median = number(line, "cost of a failure, median s")
            right.hlines(median, place - 0.3, place + 0.3, color=shade, linewidth=2)
            right.annotate(f"{median:.2f} s", (place + 0.34, median), fontsize=8, va="center")
        short = [str(line["system"]).replace(" ", "\n", 1) for line in lines]
        for axes in (left, right):
            axes.set_xticks(range(len(lines)), short, fontsize=8)
            axes.set_xlim(-0.6, len(lines) - 0.1)
            axes.grid(axis="x", visible=False)
        figures.plain_log(right)
        left.set_ylabel("step time with saves / that of plain DDP")
        right.set_ylabel("cost of a failure, seconds (line: median)")
        left.margins(y=0.1)


def _task(size: Size, seed: int) -> Task:
    interval = size.intervals[0]
    kills = kills_every(interval, size.lost, size.replicas, seed)
    return Task(
        replicas=size.replicas,
        accumulation=size.accumulation,
        steps=kills[-1].step + interval // 2,
        seed=seed,
        preset=size.preset,
        microbatch_ms=size.microbatch_ms,
        bandwidth_mbps=size.bandwidth_mbps,
        kills=kills,
        checkpoint_every=interval,
    )


def _save_s(trace: Trace) -> float:
    begins, ends = trace.times("save_begin"), trace.times("save_end")
    spans = [end - begin for begin, end in zip(begins, ends, strict=False)]
    return statistics.median(spans) if spans else 0.0


def _costs(rows: Sequence[Row], label: str) -> list[float]:
    mine = those(rows, system=label)
    return column(
        [row for row in mine if row["cost of a failure s"] is not None], "cost of a failure s"
    )


def _over_rounds(rows: Sequence[Row], name: str) -> float:
    return statistics.median(
        [column(those(rows, round=r), name)[0] for r in distinct(rows, "round")]
    )
