"""Where the time of one failure goes. Layer: evaluation. Paper: Figures 8c, 10c, Section A.1."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recover.evaluation.contender import Trace
from recover.evaluation.experiments import paper
from recover.evaluation.experiments.failures import CONTENDERS, settings
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
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS = ("checkpoint-restart", "ReCoVer")
PARTS = {
    "run": "training before the failure",
    "handling": "exit and detection",
    "save": "checkpoint save",
    "restart": "restart initialization",
    "load": "checkpoint load",
    "rerun": "rerun of lost work",
    "recovery": "ReCoVer recovery",
    "extra": "extra microbatches",
}
"""Components, in the order in which they are stacked."""
PAPER_PARTS = (
    ("run", "handling", "save", "restart", "load", "rerun"),
    ("run", "handling", "recovery"),
)
"""The components that the paper tells of each system."""


class Breakdown:
    """Components of one failure at 1.5 N, for checkpoint intervals N."""

    name = "breakdown"
    title = "What one failure costs"
    paper = "Figures 8c and 10c"
    explanation = (
        "One kill in step 1.5 N (counted from one), halfway between two checkpoints. Of "
        "checkpoint-restart: A before the save after step N, B after it, C the SIGKILL, D all "
        "processes gone, E and F around the load, G training resumed, H the step that was hit is "
        "committed; save = B - A, run = C - B, handling = D - C, load = F - E, restart = G - D - "
        "(F - E), rerun = H - G. Where no checkpoint was complete there is no E "
        "and F. Of ReCoVer: run from the commit of step N to the SIGKILL, "
        "recovery from there to the commit of the step, less extra, the microbatches of the dead "
        "replica that survivors run; what is reduced again is part of the recovery."
    )
    full = Size(
        replicas=16,
        intervals=(2, 4, 8, 16, 32, 64),
        preset="nano",
        restart_s=50.0,
    )
    quick = Size(
        replicas=2,
        accumulation=2,
        intervals=(8,),
        preset="nano",
        microbatch_ms=20.0,
        bandwidth_mbps=100.0,
    )

    def plan(self, size: Size) -> Mapping[str, Run]:
        """Plan both contenders for every interval; runs end with the step that is hit."""
        runs: dict[str, Run] = {}
        for interval in size.intervals:
            task = settings(replace(size, intervals=(interval,), failures=1))[0].task
            task = replace(task, steps=task.kills[0].step + 1)
            runs |= {f"{interval}: {who}": Job(who, task) for who in CONTENDERS}
        return runs

    def rows(self, traces: Traces) -> list[Row]:
        """Return one row per interval and system."""
        rows: list[Row] = []
        for name, trace in traces.items():
            interval, who = name.split(": ")
            parts = baseline_parts(trace) if who == "checkpoint" else recover_parts(trace)
            system = SYSTEMS[CONTENDERS.index(who)]
            rows.append(_row(int(interval), system, parts) | {"steps rerun": reruns(trace)})
        return rows

    def table(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows."""
        return list(rows)

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """Return the paper's components and ours for the intervals that both have."""
        lines: list[Row] = []
        for interval, parts in paper.PARTS.items():
            for system, names, seconds in zip(SYSTEMS, PAPER_PARTS, parts, strict=True):
                for ours in those(rows, interval=interval, system=system):
                    theirs = _row(interval, system, dict(zip(names, seconds, strict=True)))
                    lines += [_told("paper", theirs), _told("ours", ours)]
        return lines

    def words(self, rows: Sequence[Row]) -> list[str]:
        """Say the totals at both ends, and ReCoVer's recovery."""
        theirs, ours = (those(rows, system=system) for system in SYSTEMS)
        recovery = column(ours, "recovery")
        said = [
            f"ReCoVer's recovery took {min(recovery):.2f} s to {max(recovery):.2f} s, whatever N "
            "(the paper: 9 s to 10 s, after 132 s to 143 s of NCCL's timeout).",
        ]
        for a, b in ((theirs[0], ours[0]), (theirs[-1], ours[-1])):
            totals = f"{number(a, 'total'):.1f} s against {number(b, 'total'):.1f} s"
            said.append(f"N = {a['interval']}: {totals}.")
        for row in theirs:
            if number(row, "steps rerun") > number(row, "interval") / 2:
                said.append(
                    f"N = {row['interval']}: the checkpoint was not complete when the replica was "
                    f"killed, so {row['steps rerun']} steps were rerun."
                )
        return said

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        """Draw stacked bars, two per interval."""
        from recover.evaluation import figures

        axes = figure.subplots()
        names, at = [], []
        for place, interval in enumerate(distinct(rows, "interval")):
            for shift, system in enumerate(SYSTEMS):
                (row,) = those(rows, interval=interval, system=system)
                at.append(place * 2.6 + shift)
                short = "restart" if system != "ReCoVer" else system
                names.append(f"N = {interval}, {short}")
                left = 0.0
                for part, label in PARTS.items():
                    if (seconds := row[part]) is None:
                        continue
                    assert isinstance(seconds, int | float)
                    shade = figures.PARTS[part]
                    axes.barh(at[-1], seconds, 0.9, left=left, color=shade, label=label)
                    left += seconds
                figures.name_bar_end(axes, at[-1], left, f"{left:.1f} s")
        axes.set_yticks(at, names)
        axes.invert_yaxis()
        axes.margins(x=0.09)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds from the last checkpoint until training is past the failure")
        figures.legend(figure, axes)


def baseline_parts(trace: Trace) -> dict[str, float]:
    """Return the components of checkpoint-restart from its moments A to H."""
    (c,) = trace.times("failure")
    a = max(time for time in trace.times("save_begin") if time <= c)
    b = max(time for time in trace.times("save_end") if time <= c)
    d, g = (min(time for time in trace.times(name) if time > c) for name in ("exit", "resumed"))
    e, f = (
        max((t for t in trace.times(x) if c < t), default=g) for x in ("load_begin", "load_end")
    )
    h = _hit_commit(trace, g)
    return {
        "save": b - a,
        "run": c - b,
        "handling": d - c,
        "load": f - e,
        "restart": g - d - (f - e),
        "rerun": h - g,
    }


def reruns(trace: Trace) -> int:
    """Return the steps that were made again, the one that was hit included."""
    hit, resumed = (
        [moment.step for moment in trace.moments if moment.name == name]
        for name in ("failure", "resumed")
    )
    if not resumed or hit[0] is None:
        return 0
    return hit[0] - (resumed[0] or 0) + 1


def recover_parts(trace: Trace) -> dict[str, float]:
    """Return the components of ReCoVer; recording starts where step N has been committed."""
    (failure,) = (moment for moment in trace.moments if moment.name == "failure")
    assert failure.step is not None, failure
    checkpoint = (failure.step + 1) * 2 // 3
    begin = next(commit.time for commit in trace.commits if commit.step == checkpoint - 1)
    (recovered,) = (moment for moment in trace.moments if moment.name == "recovered")
    extra_s = float(recovered.facts.get("extra_s", 0.0))
    return {
        "run": failure.time - begin,
        "recovery": _hit_commit(trace, failure.time) - failure.time - extra_s,
        "extra": extra_s,
    }


def _hit_commit(trace: Trace, after: float) -> float:
    (hit,) = (moment.step for moment in trace.moments if moment.name == "failure")
    return next(c.time for c in trace.commits if c.time > after and c.step == hit)


def _row(interval: int, system: str, parts: Mapping[str, float]) -> dict[str, Cell]:
    cells = {part: parts.get(part) for part in PARTS}
    return {"interval": interval, "system": system, **cells, "total": sum(parts.values())}


def _told(whose: str, row: Row) -> Row:
    cells = {f"{label}, s": row[part] for part, label in PARTS.items()}
    return {"N": row["interval"], "system": row["system"], "whose": whose, **cells} | {
        "total, s": row["total"]
    }
