"""The horizontal axis that all charts of a run share, and round numbers for any. Layer: report.

A chart is as wide as its page allows, on a desktop and on a phone. So everything is placed in per
cent of the plot: lines in an SVG that is stretched (their strokes are not), texts and cells around
and above it in HTML, which keep their size. Whatever has ``data-tip`` shows that text when it is
pointed at; the page's script sees to it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recover.report.data import RunView
from recover.report.markup import Html, tag

NARROWEST = 270
"""Pixels of a plot on a phone; what is labelled has to find room there."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Consecutive steps, each of which has a column of the plot."""

    first: int
    last: int

    def left(self, step: float) -> float:
        """Return where a step's column begins, in per cent of the width."""
        return 100 * (step - self.first) / (self.last + 1 - self.first)

    def centre(self, step: float) -> float:
        """Return the middle of a step's column, in per cent of the width."""
        return self.left(step + 0.5)

    def groups(self, limit: int) -> Iterator[tuple[int, int]]:
        """Cut the axis into at most ``limit`` groups of steps, as (first, last)."""
        size = -(-(self.last + 1 - self.first) // limit)
        for begin in range(self.first, self.last + 1, size):
            yield begin, min(begin + size - 1, self.last)

    def labels(self) -> Html:
        """Return the numbers below the plot, as many as find room on a phone."""
        room = NARROWEST // (7 * len(f"{self.last:,}") + 24)
        end = max(self.last, self.first + 1)
        round_numbers, _ = ticks(self.first, end, min(room, 7), (1, 2, 2.5, 5, 10))
        steps = [int(t) for t in round_numbers if t == int(t) and t <= self.last]
        labels = [tag("span", f"{s:,}", style=f"left:{self.centre(s):.2f}%") for s in steps]
        return tag("div", *labels, tag("em", "step"), class_="steps")


def axis_of(views: Sequence[RunView]) -> Axis | None:
    """Return the axis that shows all steps of the runs; None where there is none."""
    steps = [step.step for view in views for step in view.steps]
    steps += [event.step for view in views for event in view.run.events]
    return Axis(min(steps), max(steps)) if steps else None


def ticks(
    low: float, high: float, about: int, digits: Sequence[float] = (1, 2, 5, 10)
) -> tuple[list[float], float]:
    """Return round numbers between two others, and how far they are apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * digit for digit in digits if power * digit >= rough)
    begin, end = math.ceil(low / distance), math.floor(high / distance)
    return [n * distance for n in range(begin, end + 1)], distance


def key(entries: Sequence[tuple[str, str, str]]) -> Html:
    """Return a legend; an entry is (class of what is drawn, letter in it, words)."""
    items = [tag("li", tag("i", letter, class_=look), text) for look, letter, text in entries]
    return tag("ul", *items, class_="key")
