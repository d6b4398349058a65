"""Charts of one number per step. Layer: report."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from recover.report import words
from recover.report.axis import NARROWEST, Axis, ticks
from recover.report.data import Failure, thin
from recover.report.markup import Html, tag

HEIGHT = 200
"""Of the plot in the SVG's own units; its width is 100. The page stretches it."""
POINTS = 800
"""Points of a curve that are drawn: a plot is hardly wider in pixels."""
TIPS = 250
"""Columns of a plot that can be pointed at."""
STYLES = 8
"""Ways to draw a run: the style sheet has colours and dashes for so many."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One number per step of one run, which failed at times."""

    label: str
    style: str
    values: Mapping[int, float]
    """By step; what is not finite is a gap."""
    failures: Sequence[Failure]

    @property
    def drawn(self) -> list[tuple[int, float]]:
        """The points that are drawn."""
        return thin(list(self.values.items()), {f.event.step for f in self.failures}, POINTS)


def style_of(number: int, runs: int) -> str:
    """Return how the run with a number is drawn; the first of several is wide and lies below."""
    return f"s{number % STYLES}{' wide' if number == 0 and runs > 1 else ''}"


def line_chart(
    name: str,
    unit: str,
    axis: Axis,
    curves: Sequence[Curve],
    text: Callable[[float], str],
    *,
    from_zero: bool = False,
) -> Html:
    """Return the chart of curves, whose numbers ``text`` puts in words."""
    drawn = [(curve.style, curve.drawn) for curve in curves]
    finite = [y for _, points in drawn for _, y in points if math.isfinite(y)]
    low, high = _limits(finite, from_zero=from_zero)
    levels, distance = ticks(low, high, 5)

    def height(value: float) -> float:
        return HEIGHT * (high - value) / (high - low)

    plot = tag(
        "svg",
        *(_line(0, 100, height(value), height(value), "level") for value in levels),
        *(
            _line(x, x, 0, HEIGHT, f"failure {curve.style}")
            for curve in curves
            for x in (axis.centre(failure.event.step) for failure in curve.failures)
        ),
        *(_path(style, points, axis, height) for style, points in drawn),
        *(_tip(axis, curves, first, last, text) for first, last in axis.groups(TIPS)),
        viewbox=f"0 0 100 {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{name} ({unit}), {words.steps(axis.first, axis.last)}",
    )
    labels = [
        tag("span", words.tick(value, distance), style=f"top:{100 * height(value) / HEIGHT:.2f}%")
        for value in levels
    ]
    return tag(
        "figure",
        tag("figcaption", tag("b", name), " ", tag("small", unit)),
        tag("div", *_failure_labels(axis, curves), class_="above"),
        tag("div", *labels, class_="levels", aria_hidden="true"),
        tag("div", plot, class_="plot"),
        axis.labels(),
        class_="chart lines",
    )


def _limits(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """Return the lowest and the highest value shown, with some air around the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if from_zero:
        return 0.0, high * 1.05 or 1.0
    air = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - air, high + air


def _line(x1: float, x2: float, y1: float, y2: float, look: str) -> Html:
    places = {"x1": x1, "x2": x2, "y1": y1, "y2": y2}
    return tag("line", class_=look, **{name: f"{at:.2f}" for name, at in places.items()})


def _path(
    style: str, points: Sequence[tuple[int, float]], axis: Axis, height: Callable[[float], float]
) -> Html:
    """Draw a curve; a lone point becomes a dot, since the stroke's ends are round."""
    path, drawing = [], False
    for step, value in points:
        if math.isfinite(value):
            start, dot = ("L", "") if drawing else ("M", "h0")
            path.append(f"{start}{axis.centre(step):.2f} {height(value):.1f}{dot}")
        drawing = math.isfinite(value)
    return tag("path", class_=f"curve {style}", d="".join(path))


def _tip(
    axis: Axis, curves: Sequence[Curve], first: int, last: int, text: Callable[[float], str]
) -> Html:
    """Return the column over some steps that shows their numbers and failures."""
    told = [words.steps(first, last)]
    for curve in curves:
        values = [curve.values[s] for s in range(first, last + 1) if s in curve.values]
        finite = [value for value in values if math.isfinite(value)] or values
        if finite:
            low, high = text(min(finite)), text(max(finite))
            told.append(f"{curve.label}: {low}" + (f" to {high}" if high != low else ""))
    told += [
        f"{curve.label}: {f.what} in step {f.event.step}, {words.seconds(f.lasted_s)}"
        for curve in curves
        for f in curve.failures
        if first <= f.event.step <= last
    ]
    left, right = axis.left(first), axis.left(last + 1)
    box = {"x": f"{left:.3f}", "width": f"{right - left:.3f}", "y": 0, "height": HEIGHT}
    return tag("rect", class_="hit", **box, data_tip="\n".join(told))


def _failure_labels(axis: Axis, curves: Sequence[Curve]) -> Iterator[Html]:
    """Write above the plot which replicas were lost, wherever that fits on a phone."""
    lost: dict[tuple[int, str], list[int]] = {}
    for curve in curves:
        for failure in curve.failures:
            lost.setdefault((failure.event.step, curve.style), []).extend(failure.event.replicas)
    free = -math.inf
    for (step, style), replicas in sorted(lost.items()):
        who = " ".join(f"r{replica}" for replica in replicas) or "error"
        who = who if len(replicas) <= 2 else f"{len(replicas)} replicas"
        centre, half = axis.centre(step), 100 * (7 * len(who) + 6) / 2 / NARROWEST
        if centre - half >= free:
            free = centre + half
            yield tag("span", who, class_=style, style=f"left:{centre:.2f}%")
