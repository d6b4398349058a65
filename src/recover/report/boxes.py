"""Charts made of boxes: roles of replicas, phases of recoveries. Layer: report."""

from collections.abc import Iterator, Sequence

from recover.report import words
from recover.report.axis import NARROWEST, Axis
from recover.report.data import DEAD, Failure, RunView, Span
from recover.report.markup import Html, tag

LETTERS = {
    "major": "M",
    "minor": "m",
    "major_spare": "S",
    "minor_spare": "s",
    "boundary_minor": "B",
    DEAD: "",
}
"""What is written into a cell that has room for it."""


def roles(view: RunView, axis: Axis) -> Html:
    """Return one row per replica: what it was in each step, promotions and losses marked."""
    replicas = view.replicas
    look = "roomy" if len(replicas) <= 8 else "medium" if len(replicas) <= 24 else "dense"
    return tag(
        "figure",
        tag("figcaption", tag("b", "What each replica was"), " ", tag("small", "one row each")),
        tag(
            "div",
            *(_row(view, axis, replica) for replica in replicas),
            class_=f"rows {look}",
            aria_hidden="true",
        ),
        axis.labels(),
        class_="chart roles",
    )


def recoveries(failures: Sequence[Failure]) -> Html:
    """Return one bar per recovery, its phases one after the other."""
    longest = max(failure.lasted_s for failure in failures) or 1.0
    return tag(
        "figure",
        tag("figcaption", tag("b", "Time of each recovery"), " ", tag("small", "by phase")),
        *(_bar(failure, longest) for failure in failures),
        class_="bars",
    )


def _row(view: RunView, axis: Axis, replica: int) -> Html:
    cells = [_cell(axis, replica, span) for span in view.spans(replica)]
    lane = tag("div", *cells, *_marks(view, axis, replica), class_="lane")
    return tag("div", tag("span", replica, class_="who"), lane)


def _cell(axis: Axis, replica: int, span: Span) -> Html:
    left, width = axis.left(span.first), axis.left(span.last + 1) - axis.left(span.first)
    pixels = width / 100 * NARROWEST
    does = "" if span.role == DEAD else f", contributes {span.contribution}"
    return tag(
        "i",
        LETTERS[span.role] if pixels >= 26 else "",
        class_=span.role if pixels >= 4 else f"{span.role} thin",
        style=f"left:{left:.3f}%;width:{width:.3f}%",
        data_tip=f"replica {replica}, {span.steps}: {span.role.replace('_', ' ')}{does}",
    )


def _marks(view: RunView, axis: Axis, replica: int) -> Iterator[Html]:
    """Mark where a replica was promoted (u) and where it was lost (b)."""
    for event in view.run.events:
        if replica in event.promoted:
            told = f"replica {replica}, step {event.step}: promoted, its microbatches count"
            yield tag("u", style=f"left:{axis.left(event.step):.3f}%", data_tip=told)
    lost = view.lost_in.get(replica)
    if lost is not None:
        told = f"replica {replica}: lost in step {lost}"
        yield tag("b", style=f"left:{axis.centre(lost):.3f}%", data_tip=told)


def _bar(failure: Failure, longest: float) -> Html:
    name = f"step {failure.event.step}: {failure.what}"
    parts = [
        tag(
            "i",
            class_=phase,
            style=f"width:{100 * spent / longest:.3f}%",
            data_tip=f"{name}\n{phase}: {words.seconds(spent)}",
        )
        for phase, spent in failure.phases.items()
        if spent > 0
    ]
    return tag(
        "div",
        tag("span", name, class_="who"),
        tag("div", *parts, class_="bar"),
        tag("span", words.seconds(failure.lasted_s), class_="sum"),
    )
