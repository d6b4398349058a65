"""A section of a report in Markdown: what was run, what came out. Layer: evaluation; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recover.evaluation.contender import Trace
from recover.evaluation.experiments.protocol import Cell, Experiment, Row

LABELS = {
    "replicas": "replicas",
    "accumulation": "microbatches per replica",
    "steps": "steps",
    "preset": "model",
    "sequences": "sequences per microbatch",
    "microbatch_ms": "emulated ms per microbatch",
    "bandwidth_mbps": "emulated Mbit/s",
    "checkpoint_every": "checkpoint every",
}
"""Settings that a reader must know, as they are called in the text."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """How the runs are made again, and what is missing."""

    command: str
    left_out: Sequence[str] = ()
    """Why runs that may be missing are."""


def section(
    experiment: Experiment,
    rows: Sequence[Row],
    traces: Mapping[str, Trace],
    circumstances: Circumstances,
) -> str:
    """Return the section; figure and rows lie beside it under the experiment's name."""
    name = experiment.name
    heading = f"## {experiment.title}" + (f" ({experiment.paper})" if experiment.paper else "")
    findings = [*experiment.words(rows), *circumstances.left_out]
    compared = experiment.beside(rows)
    parts = [
        heading,
        "\n".join(f"- {sentence}" for sentence in findings),
        table(experiment.table(rows)),
        f"![{experiment.title}]({name}.svg)",
        *(
            [f"Beside the paper ({experiment.paper.split(' and ')[0]}):", table(compared)]
            if compared
            else []
        ),
        experiment.explanation,
        f"{_sentence(settings(traces))}. {surroundings(traces)}. Every value: "
        f"[{name}.csv]({name}.csv). Made by",
        f"```\n{circumstances.command}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def settings(traces: Mapping[str, Trace]) -> str:
    """Return the settings of the runs, and whether compute was emulated, in one line."""
    told = [f"{len(traces)} runs", emulation(traces)]
    for setting, label in LABELS.items():
        values = {trace.settings.get(setting) for trace in traces.values()} - {None}
        if values and values != {0}:
            told.append(f"{label} {' / '.join(sorted(map(_plain, values), key=_by_size))}")
    return ", ".join(told)


def surroundings(traces: Mapping[str, Trace]) -> str:
    """Return on what machines and days the runs were made."""
    told = [trace.settings for trace in traces.values()]
    return ", ".join(
        " / ".join(sorted({str(one[name]) for one in told if name in one}))
        for name in ("machine", "date")
    )


def emulation(traces: Mapping[str, Trace]) -> str:
    """Say whether a device was emulated; every figure carries it."""
    if all("microbatch_ms" not in trace.settings for trace in traces.values()):
        return "no training"
    emulated = [trace.settings.get("microbatch_ms") for trace in traces.values()]
    return "emulated compute" if any(emulated) else "real compute on shared cores"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table; a missing cell stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    words = {name for row in rows for name, cell in row.items() if isinstance(cell, str)}
    rule = "|".join("---" if name in words else "---:" for name in names)
    lines = [f"| {' | '.join(_safe(name) for name in names)} |", f"|{rule}|"]
    lines += [f"| {' | '.join(_safe(shown(row.get(name))) for name in names)} |" for row in rows]
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """Return a cell for people: three or four digits that matter."""
    match cell:
        case None:
            return ""
        case str():
            return cell
        case int():
            return f"{cell:,}"
    if cell and abs(cell) < 0.01:
        return f"{cell:.1e}"
    digits = next((d for limit, d in ((1, 3), (10, 2), (1000, 1)) if abs(cell) < limit), 0)
    return f"{cell:,.{digits}f}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _by_size(text: str) -> tuple[int, str]:
    return len(text), text


def _safe(text: str) -> str:
    return text.replace("|", "\\|")
