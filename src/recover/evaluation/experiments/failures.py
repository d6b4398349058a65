"""What successive failures leave of the throughput. Layer: evaluation. Paper: Figures 8a, 10a."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from recover.evaluation.contender import Kill, Task, Trace
from recover.evaluation.experiments import measures, paper
from recover.evaluation.experiments.protocol import (
    Cell,
    Job,
    Row,
    Run,
    Size,
    Traces,
    column,
    distinct,
    number,
    those,
    transferred_megabits,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER, GIVEN = "ratios of the paper", "the device that was asked for"
RARE, SINGLE = "rare failures", "one microbatch per replica"
PANELS = {RARE: "rare\nfailures", SINGLE: "one microbatch\nper replica"}
RARER, OFTENER = 2, 2
"""Rare failures are so many times rarer than in the paper, checkpoints so many times as often."""
CONTENDERS = ("checkpoint", "recover")


@dataclass(frozen=True, slots=True)
class Setting:
    """A comparison: the same job and kills for both contenders."""

    name: str
    task: Task


def settings(size: Size) -> tuple[Setting, ...]:
    """Return the paper's setting, or the one given, and those that suit checkpoint-restart."""
    interval, ms = size.intervals[0], size.microbatch_ms
    mbps = size.bandwidth_mbps
    if size.restart_s:
        device = paper.emulation(size.restart_s)
        ms, megabits = device.microbatch_ms, transferred_megabits(size.preset, size.replicas)
        mbps = megabits / device.all_reduce_s
    name = PAPER if size.restart_s else GIVEN
    usual = Setting(name, _task(size, size.accumulation, interval, size.lost, ms, mbps))
    if not size.variants:
        return (usual,)
    often = max(2, interval // OFTENER)
    kills = kills_every(often, 1, size.replicas, size.seed)
    rare = replace(
        usual.task,
        steps=kills[0].step + RARER * interval,
        kills=kills,
        checkpoint_every=often,
    )
    step_ms = size.accumulation * ms + 1000 * _all_reduce_s(size, mbps)
    single = replace(rare, accumulation=1, microbatch_ms=round(step_ms, 1), bandwidth_mbps=0.0)
    return usual, Setting(RARE, rare), Setting(SINGLE, single)


def _all_reduce_s(size: Size, mbps: float) -> float:
    return transferred_megabits(size.preset, size.replicas) / mbps if mbps else 0.0


def kills_every(interval: int, failures: int, replicas: int, seed: int) -> tuple[Kill, ...]:
    """Return kills in the steps 1.5 N, 2.5 N, ... (counted from one), as in the paper.

    Raises ValueError where there are none.
    """
    if failures < 1:
        raise ValueError(f"--failures must be at least 1 here, got {failures}")
    victims = random.Random(f"victims {seed}").sample(range(replicas), failures)
    first = interval + interval // 2 - 1
    return tuple(Kill(first + i * interval, victim) for i, victim in enumerate(victims))


def _task(
    size: Size, accumulation: int, interval: int, failures: int, ms: float, mbps: float
) -> Task:
    kills = kills_every(interval, failures, size.replicas, size.seed)
    return Task(
        replicas=size.replicas,
        accumulation=accumulation,
        steps=kills[-1].step + interval,
        seed=size.seed,
        preset=size.preset,
        microbatch_ms=round(ms, 1),
        bandwidth_mbps=round(mbps, 2),
        kills=kills,
        checkpoint_every=interval,
    )


class Failures:
    """Effective throughput after each failure: static ReCoVer against checkpoint-restart."""

    name = "failures"
    title = "Effective throughput after each failure"
    paper = "Figures 8a and 10a"
    explanation = (
        "Checkpoints every N steps, kills in the steps 1.5 N, 2.5 N, ..., all inside gradient "
        "synchronisation. Effective throughput of the interval after a failure = processed tokens "
        "/ (runtime x alive replicas); what is rerun counts once. Checkpoint-restart gets a new "
        "replica for each dead one, without waiting for it; ReCoVer goes on with fewer. The last "
        "interval is as long as the others. The metric favours a system that goes on with fewer "
        "devices: with equal runtimes the ratio is the ratio of the alive devices, which is 2.00 "
        "after 8 of 16. The columns with seconds tell what somebody sees who has the spares. In "
        "`rare failures` failures are half as frequent, checkpoints twice as frequent. In `one "
        "microbatch per replica` B is the number of replicas, all of a step is compute, failures "
        "are as rare: the survivors need a second pass, which most of them spend as spares. That "
        "is the setting that suits ReCoVer least."
    )
    full = Size(replicas=16, intervals=(16,), preset="nano", restart_s=50.0, variants=True)
    quick = Size(
        replicas=3,
        accumulation=2,
        intervals=(4,),
        preset="nano",
        microbatch_ms=20.0,
        bandwidth_mbps=100.0,
    )

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Plan both contenders in every setting."""
        return {
            f"{setting.name}: {contender}": Job(contender, setting.task)
            for setting in settings(size)
            for contender in CONTENDERS
        }

    def rows(self, traces: Traces) -> list[Row]:
        """Return one row per setting and failure."""
        names = dict.fromkeys(name.rsplit(": ", 1)[0] for name in traces)
        return [
            row
            for name in names
            for row in compared(name, *(traces[f"{name}: {who}"] for who in CONTENDERS))
        ]

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows without what the words tell."""
        left_out = {"checkpoint step s", "ReCoVer step s", "restart s"}
        return [{k: v for k, v in row.items() if k not in left_out} for row in rows]

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return the ratios after as many failures as both have, in the first setting."""
        ours = those(rows, setting=rows[0]["setting"])
        return [
            {
                "failure": row["failure"],
                "paper: GPUs left of 128": left,
                "paper: checkpoint-restart": theirs,
                "paper: ReCoVer": recover,
                "paper: ratio": recover / theirs,
                f"ours: replicas left of {row['checkpoint replicas']}": row["ReCoVer replicas"],
                "ours: checkpoint-restart": row["checkpoint tokens/s/replica"],
                "ours: ReCoVer": row["ReCoVer tokens/s/replica"],
                "ours: ratio": row["ratio"],
            }
            for row, (left, theirs, recover) in zip(ours, paper.AFTER_FAILURES, strict=False)
        ]

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Say the ratio after the last failure, the wall time, and what a restart weighed."""
        said = []
        for name in distinct(rows, "setting"):
            mine = those(rows, setting=name)
            last, step = mine[-1], number(mine[0], "checkpoint step s")
            restart = statistics.median(column(mine, "restart s"))
            theirs, ours = number(last, "checkpoint s"), number(last, "ReCoVer s")
            said.append(
                f"{_sentence(name)}: {number(last, 'ratio'):.2f} x checkpoint-restart after "
                f"failure {last['failure']} ({last['ReCoVer replicas']} of "
                f"{last['checkpoint replicas']} replicas left). That interval took {theirs:.1f} s "
                f"with restarts and {ours:.1f} s without. From a kill to resumed training: "
                f"{restart:.1f} s, {restart / step:.1f} steps of {step:.2f} s."
            )
        weight = paper.RESTART_S / paper.STEP_S
        said.append(f"In the paper a restart weighs {weight:.1f} steps, NCCL's timeout left out.")
        return said

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw bars side by side, one panel per setting, the ratio above them."""
        from recover.evaluation import figures

        names = distinct(rows, "setting")
        widths = [max(len(those(rows, setting=name)), 2) for name in names]
        panels = figure.subplots(1, len(names), squeeze=False, width_ratios=widths)[0]
        for axes, name in zip(panels, names, strict=True):
            mine = those(rows, setting=name)
            at = column(mine, "failure")
            for shift, who in ((-0.2, "checkpoint"), (0.2, "ReCoVer")):
                rates = column(mine, f"{who} tokens/s/replica")
                bars = [x + shift for x in at]
                label = "checkpoint-restart" if who == "checkpoint" else who
                axes.bar(bars, rates, 0.38, color=figures.colour(who), label=label)
                if who == "ReCoVer":
                    figures.name_bars(
                        axes, bars, rates, [f"{r:.2f}×" for r in column(mine, "ratio")]
                    )
            axes.set_title(PANELS.get(str(name), str(name)))
            axes.set_xticks(at)
            axes.set_xlabel("failure")
            axes.margins(y=0.1)
            axes.grid(axis="x", visible=False)
        panels[0].set_ylabel("tokens per second and alive replica")
        figures.legend(figure, panels[-1])


def compared(name: str, checkpoint: Trace, recover: Trace) -> list[Row]:
    """Return one row per failure of a setting."""
    steps = [measures.undisturbed_step_s(trace) for trace in (checkpoint, recover)]
    restarts = [
        resumed - failed
        for failed, resumed in zip(
            checkpoint.times("failure"), checkpoint.times("resumed"), strict=True
        )
    ]
    pairs = zip(measures.intervals(checkpoint), measures.intervals(recover), restarts, strict=True)
    return [
        {
            "setting": name,
            "failure": failure,
            "checkpoint replicas": theirs.devices,
            "ReCoVer replicas": ours.devices,
            "checkpoint s": theirs.seconds,
            "ReCoVer s": ours.seconds,
            "checkpoint tokens/s/replica": theirs.rate,
            "ReCoVer tokens/s/replica": ours.rate,
            "ratio": ours.rate / theirs.rate,
            "checkpoint step s": steps[0],
            "ReCoVer step s": steps[1],
            "restart s": restart,
        }
        for failure, (theirs, ours, restart) in enumerate(pairs, start=1)
    ]


def _sentence(name: Cell) -> str:
    text = str(name)
    return text[:1].upper() + text[1:]
