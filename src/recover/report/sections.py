"""The parts of a report: curves of all runs, and what is said of each. Layer: report."""

import json
import math
from collections.abc import Callable, Mapping, Sequence

from recover.report import boxes, words
from recover.report.axis import Axis, axis_of, key
from recover.report.curves import POINTS, Curve, line_chart, style_of
from recover.report.data import DEAD, PHASES, Failure, RunView, differences, per_second
from recover.report.markup import Html, join, tag

UNFOLDED = 3
"""Up to so many runs, what is shown of each by itself is shown at once."""
ROWS = 50
"""Rows of the table that stands for a curve, failures not counted."""
ROLES = {
    "major": "major",
    "minor": "minor",
    "major_spare": "major spare",
    "minor_spare": "minor spare",
    "boundary_minor": "boundary minor",
    DEAD: "gone",
    "promoted": "promoted here",
    "lost": "lost here",
}
PHASE_WORDS = {
    "detect": "detect",
    "repair": "repair",
    "restore": "restore",
    "extra": "extra microbatches",
    "rest": "rest: reduce again, agree, commit",
}
RECOVERY_HEAD = ("step", "lost", "noticed in", "promoted", "extra run", *PHASES, "total")


def losses(views: Sequence[RunView]) -> Html:
    """Return the losses of all runs, and how far they are from those of the first one."""
    axis = axis_of(views)
    if axis is None:
        return Html("")
    curves = [
        _curve(view, style_of(number, len(views)), {step.step: step.loss for step in view.steps})
        for number, view in enumerate(views)
    ]
    entries = [(f"run {curve.style}", "", curve.label) for curve in curves]
    if any(curve.failures for curve in curves):
        entries.append(("failed", "", "failure (r2: replica 2 lost)"))
    return join(
        tag("h2", "Loss"),
        key(entries),
        _chart("Loss per microbatch", "mean", axis, curves, words.loss),
        _apart(views, curves, axis),
    )


def one_run(view: RunView, number: int, views: Sequence[RunView]) -> Html:
    """Return what is shown of one run by itself; of several, each can be folded."""
    axis = axis_of([view])
    parts = join(
        join(_roles(view, axis), _throughput(view, axis, style_of(number, 1))) if axis else "",
        _recoveries(view.failures),
        _settings(view.run.config),
    )
    if len(views) == 1:
        return parts
    title = tag("summary", tag("h2", view.label))
    return tag("details", title, parts, class_="one", open=len(views) <= UNFOLDED)


# --- curves ----------------------------------------------------------------------------------


def _curve(view: RunView, style: str, values: Mapping[int, float]) -> Curve:
    return Curve(view.label, style, values, view.failures)


def _chart(
    name: str,
    unit: str,
    axis: Axis,
    curves: Sequence[Curve],
    text: Callable[[float], str],
    *,
    from_zero: bool = False,
) -> Html:
    """Return a chart, what was left out of it, and the table that stands for it."""
    longest = max(len(curve.values) for curve in curves)
    notes = []
    for curve in curves:
        gaps = sum(not math.isfinite(value) for value in curve.values.values())
        if gaps:
            notes.append(f"{curve.label}: no number in {words.number_of('step', gaps)}.")
    if longest > POINTS:
        size = -(-2 * longest // POINTS)
        notes.append(
            f"Of {size} steps each, the lowest and the highest are drawn, and all with a failure."
        )
    hit = {failure.event.step for curve in curves for failure in curve.failures}
    shown = sorted({first for first, _ in axis.groups(ROWS)} | hit | {axis.last})
    rows = [
        (str(step), *(text(c.values[step]) if step in c.values else "" for c in curves))
        for step in shown
    ]
    return join(
        line_chart(name, unit, axis, curves, text, from_zero=from_zero),
        *(tag("p", note, class_="note") for note in notes),
        _folded(_table(("step", *(curve.label for curve in curves)), rows)),
    )


def _apart(views: Sequence[RunView], curves: Sequence[Curve], axis: Axis) -> Html:
    """Return the difference of the losses to those of the first run."""
    first, rows, between = views[0].label, [], []
    for view, curve, points in zip(views[1:], curves[1:], differences(views), strict=True):
        if not points:
            continue
        between.append(_curve(view, curve.style, points))
        step, largest = max(points.items(), key=lambda point: abs(point[1]))
        mean = sum(map(abs, points.values())) / len(points)
        sizes = words.small(mean), words.small(abs(largest))
        rows.append((view.label, words.count(len(points)), *sizes, words.count(step)))
    if not rows:
        return Html("")
    return join(
        tag("h3", f"Difference to {first}"),
        _table(("run", "steps", "mean |Δ|", "largest |Δ|", "in step"), rows),
        _chart("Loss difference", f"run minus {first}", axis, between, words.small),
    )


def _throughput(view: RunView, axis: Axis, style: str) -> Html:
    rates = {step.step: per_second(view.work(step), step.wall_s) for step in view.steps}
    each = {step.step: rates[step.step] / len(step.survivors) for step in view.steps}
    parts = [
        _chart(
            name, f"{view.unit}/s", axis, [_curve(view, style, values)], words.rate, from_zero=True
        )
        for name, values in (("All replicas", rates), ("Per surviving replica", each))
    ]
    rows = [
        (
            words.steps(stretch.first, stretch.last),
            str(stretch.replicas),
            words.rate(stretch.per_s),
            words.rate(stretch.per_s / stretch.replicas),
        )
        for stretch in view.stretches
    ]
    table = _table(("", "replicas", f"{view.unit}/s", "per replica"), rows)
    return join(
        tag("h3", "Throughput"),
        *parts,
        tag("p", "Means while the number of replicas stayed the same, recoveries included:"),
        table if len(rows) <= 12 else _folded(table),
    )


# --- roles, recoveries, settings -------------------------------------------------------------


def _roles(view: RunView, axis: Axis) -> Html:
    spans = {replica: list(view.spans(replica)) for replica in view.replicas}
    rows = [
        (str(replica), "; ".join(f"{span.steps}: {ROLES[span.role]}" for span in mine))
        for replica, mine in spans.items()
    ]
    seen = {span.role for mine in spans.values() for span in mine}
    seen |= {"promoted"} if any(event.promoted for event in view.run.events) else set()
    seen |= {"lost"} if view.lost_in else set()
    return join(
        tag("h3", "Roles"),
        key([(r, boxes.LETTERS.get(r, ""), text) for r, text in ROLES.items() if r in seen]),
        boxes.roles(view, axis),
        _folded(_table(("replica", "roles"), rows, look="words")),
    )


def _recoveries(failures: Sequence[Failure]) -> Html:
    if not failures:
        return join(tag("h3", "Recoveries"), tag("p", "No failure is on record."))
    sums = [sum(failure.phases[phase] for failure in failures) for phase in PHASES]
    total = sum(failure.lasted_s for failure in failures)
    blanks = ("",) * (len(RECOVERY_HEAD) - len(PHASES) - 2)
    last = ("all", *blanks, *map(words.seconds, sums), words.seconds(total))
    return join(
        tag("h3", "Recoveries"),
        key([(phase, "", text) for phase, text in PHASE_WORDS.items()]),
        boxes.recoveries(failures),
        tag(
            "p",
            "From the first sign of trouble to the commit, or to the next failure in the same "
            "step. The rest reduces again, agrees and commits.",
            class_="note",
        ),
        _table(RECOVERY_HEAD, [*map(_recovery_row, failures), last], look="sums"),
    )


def _recovery_row(failure: Failure) -> tuple[str, ...]:
    event = failure.event
    return (
        str(event.step),
        ", ".join(map(str, event.replicas)) or "nobody",
        event.location,
        ", ".join(map(str, event.promoted)) or "–",
        str(sum(event.extra.values())),
        *map(words.seconds, failure.phases.values()),
        words.seconds(failure.lasted_s),
    )


def _settings(config: Mapping[str, object]) -> Html:
    """Return the settings, and the machine where the run says which."""
    parts = [tag("h3", "Configuration"), _pairs({k: config[k] for k in config if k != "machine"})]
    machine = config.get("machine")
    if machine is not None:
        named = machine if isinstance(machine, Mapping) else {"machine": machine}
        parts += [tag("h3", "Machine"), _pairs(named)]
    return join(*parts)


def _pairs(values: Mapping[str, object]) -> Html:
    def plain(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value, default=str)

    pairs = [tag("div", tag("dt", key), tag("dd", plain(values[key]))) for key in values]
    return tag("dl", *pairs, class_="settings")


# --- tables ----------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, look: str | None = None) -> Html:
    """Return a table; where it is too wide it scrolls by itself, but ``words`` wrap."""
    columns = tag("tr", *(tag("th", name, scope="col") for name in head))
    lines = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    table = tag("table", tag("thead", columns), tag("tbody", *lines), class_=look)
    return tag("div", table, class_="scroll", tabindex=0)


def _folded(table: Html) -> Html:
    return tag("details", tag("summary", "as a table"), table, class_="folded")
