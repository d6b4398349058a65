"""Lays out a report: first all runs in a few numbers, then the sections. Layer: report."""

import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from recover.errors import RecoverError
from recover.report import sections, words
from recover.report.data import RunView, load, per_second
from recover.report.markup import Html, join, tag

LISTED = 100
"""Problems that are listed; the rest is counted."""


def write_report(directories: Sequence[Path], out: Path) -> None:
    """Write one HTML file about the runs.

    Raises ValueError for a run that cannot be read, RecoverError where ``out`` cannot be written.
    """
    text = render(load(directories))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecoverError(f"cannot write to {out}: {error.strerror}") from None


def render(views: Sequence[RunView]) -> str:
    """Return the page."""
    title = f"ReCoVer: {', '.join(view.label for view in views)}"
    body = join(
        _header(views),
        tag("div", *map(_card, views), class_="cards"),
        sections.losses(views),
        *(sections.one_run(view, number, views) for number, view in enumerate(views)),
    )
    template = files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    filled = {"title": join(title), "body": body}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], template)


def _header(views: Sequence[RunView]) -> Html:
    times = [s.time for view in views for s in view.steps if math.isfinite(s.time)]
    span = f"{words.moment(min(times))} to {words.moment(max(times))}" if times else ""
    return tag(
        "header",
        tag("h1", "ReCoVer run report"),
        tag("button", "light / dark", id="theme", type="button", hidden=True),
        tag("p", span),
    )


def _card(view: RunView) -> Html:
    kind, sentence = _verdict(view)
    facts = [tag("div", tag("dt", name), tag("dd", *value)) for name, value in _facts(view).items()]
    return tag(
        "article",
        tag("h2", view.label),
        tag("p", sentence, class_=f"verdict {kind}"),
        _listed(view.broken),
        *(tag("p", note, class_="note") for note in view.run.problems),
        tag("dl", *facts),
    )


def _verdict(view: RunView) -> tuple[str, str]:
    """Return how the invariant fared (ok, broken, open), and the sentence that says so."""
    number, counts = len(view.steps), sorted({step.microbatches for step in view.steps})
    if view.broken:
        problems = words.number_of("problem", len(view.broken))
        return "broken", f"The invariant is broken: {problems} in the records."
    if not number:
        return "open", "No step is on record yet."
    rest = "none of them twice, all reduced among the same replicas"
    if view.run.config.get("policy", "static") != "static":
        span = f"{counts[-1]:,}" + (f" to {counts[0]:,}" if len(counts) > 1 else "")
        return "open", f"This policy lets B shrink: {span} microbatches per step, {rest}."
    steps = "the one step" if number == 1 else f"each of {number:,} steps"
    return "ok", f"The invariant holds: {steps} committed B = {counts[0]:,} microbatches, {rest}."


def _listed(problems: Sequence[str]) -> Html:
    if not problems:
        return Html("")
    items = [tag("li", problem) for problem in problems[:LISTED]]
    if len(problems) > LISTED:
        items.append(tag("li", f"and {len(problems) - LISTED:,} more"))
    return tag("ul", *items, class_="problems")


def _facts(view: RunView) -> Mapping[str, tuple[str, ...]]:
    """Return the numbers of a card: name, then value and remark."""
    steps, asked = view.steps, view.run.config.get("steps")
    unfinished = isinstance(asked, int) and asked != len(steps)
    facts: dict[str, tuple[str, ...]] = {
        "Steps": (words.count(len(steps)), _remark(f"of {asked:,}" if unfinished else ""))
    }
    if not steps:
        return facts
    before, after = len(view.replicas), len(steps[-1].survivors)
    lost = f"{words.share(view.lost_s, view.wall_s)} of {words.seconds(view.wall_s)}"
    return facts | {
        view.unit.capitalize(): (words.count(view.work(*steps)),),
        "Replicas": (f"{before} → {after}",),
        "Failures survived": (
            str(len(view.failures)),
            _remark(
                f"{words.number_of('replica', len(view.lost_in))} lost" if view.failures else ""
            ),
        ),
        "Time lost to failures": (
            words.seconds(view.lost_s),
            _remark(lost if view.failures else ""),
        ),
        "Throughput": (
            words.rate(per_second(view.work(*steps), view.wall_s)),
            _remark(f"{view.unit}/s"),
        ),
        "Last loss": (words.loss(steps[-1].loss),),
    }


def _remark(text: str) -> Html:
    return join(" ", tag("small", text)) if text else Html("")
