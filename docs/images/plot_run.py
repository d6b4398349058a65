"""Draw two runs as one SVG: losses above, who ran how much in each step below. Layer: docs.

    python docs/images/plot_run.py runs/demo/reference runs/demo/recover docs/images/run.svg

Plain text out of records; needs nothing but `recover`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from recover.records import RunRecord, StepRecord, read_run

LEFT, TOP, COLUMN, ROW, CURVE = 118, 64, 27, 26, 190  # pixels
GRID_TOP = TOP + CURVE + 34
COLOURS = {
    "major": "#4c8bc4",
    "minor": "#a8cdea",
    "boundary_minor": "#f3b562",
    "major_spare": "#d9d9d9",
    "minor_spare": "#ececec",
}
INK, PALE, RED, BLUE = "#24292f", "#8b949e", "#c62828", "#1f5f99"


def main(reference: Path, disturbed: Path, picture: Path) -> None:
    """Read both runs and write the picture."""
    calm, hit = read_run(reference), read_run(disturbed)
    replicas = calm.steps[0].survivors
    width = LEFT + COLUMN * len(calm.steps) + 20
    height = GRID_TOP + ROW * (len(replicas) + 1) + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *heading(hit),
        *kills(hit, GRID_TOP + ROW * len(replicas)),
        *curves(calm, hit),
        *grid(hit, replicas),
        *legend(hit, height - 18),
        "</svg>",
    ]
    picture.write_text("\n".join(parts) + "\n", encoding="utf-8")


def centre(step: int) -> float:
    """Return the middle of a step's column."""
    return LEFT + COLUMN * (step + 0.5)


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Return one piece of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def heading(run: RunRecord) -> Iterator[str]:
    """Say what is shown."""
    batch = run.config["microbatches"]
    first, last = run.steps[0].survivors, run.steps[-1].survivors
    yield text(
        LEFT,
        24,
        f"{len(first)} replicas, {len(first) - len(last)} killed; every step commits "
        f"B = {batch} microbatches",
        'font-size="15" font-weight="bold"',
    )


def kills(run: RunRecord, bottom: float) -> Iterator[str]:
    """Mark the steps that a failure hit."""
    for event in run.events:
        x = centre(event.step)
        yield (
            f'<line x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom}" stroke="{RED}" '
            'stroke-dasharray="4 4"/>'
        )
        who = ", ".join(map(str, event.replicas))
        label = f"replica {who} killed"
        yield text(x, TOP - 12, label, f'fill="{RED}" text-anchor="middle"')


def curves(calm: RunRecord, hit: RunRecord) -> Iterator[str]:
    """Draw both losses over the step."""
    losses = [record.loss for record in (*calm.steps, *hit.steps)]
    low, high = min(losses), max(losses)

    def path(run: RunRecord) -> str:
        points = (
            f"{centre(r.step):.1f},{TOP + CURVE * (high - r.loss) / (high - low):.1f}"
            for r in run.steps
        )
        return " ".join(points)

    for value in (high, (high + low) / 2, low):
        y = TOP + CURVE * (high - value) / (high - low)
        right = centre(len(calm.steps) - 1)
        yield f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#e4e7eb"/>'
        yield text(LEFT - 8, y + 4, f"{value:.2f}", f'fill="{PALE}" text-anchor="end"')
    yield text(16, TOP + CURVE / 2 + 4, "loss")
    line = 'fill="none" stroke-linejoin="round"'
    yield f'<polyline points="{path(calm)}" {line} stroke="#c3c9d0" stroke-width="8"/>'
    yield f'<polyline points="{path(hit)}" {line} stroke="{BLUE}" stroke-width="2"/>'
    right, y = centre(len(calm.steps) - 1), 20
    for x, words, style in (
        (right - 250, "undisturbed", 'stroke="#c3c9d0" stroke-width="8"'),
        (right - 116, "with failures", f'stroke="{BLUE}" stroke-width="2"'),
    ):
        yield f'<line x1="{x}" x2="{x + 30}" y1="{y}" y2="{y}" {style}/>'
        yield text(x + 38, y + 4, words)


def grid(run: RunRecord, replicas: tuple[int, ...]) -> Iterator[str]:
    """Draw what each replica contributed to each step, and the sums."""
    for row, replica in enumerate(replicas):
        y = GRID_TOP + ROW * row
        yield text(16, y + 17, f"replica {replica}")
        for record in run.steps:
            yield from cell(record, replica, y)
    y = GRID_TOP + ROW * len(replicas)
    yield text(16, y + 19, "sum", 'font-weight="bold"')
    for record in run.steps:
        bold = 'text-anchor="middle" font-weight="bold" font-size="11"'
        yield text(centre(record.step), y + 19, str(record.microbatches), bold)
        number = 'text-anchor="middle" font-size="10"'
        yield text(centre(record.step), y + 36, str(record.step), f'{number} fill="{PALE}"')
    yield text(16, y + 36, "step", f'fill="{PALE}"')


def cell(record: StepRecord, replica: int, y: float) -> Iterator[str]:
    """Draw one replica in one step."""
    x = LEFT + COLUMN * record.step
    middle = f'x="{centre(record.step)}" y="{y + 17}" text-anchor="middle"'
    if replica in record.roles:
        colour = COLOURS[record.roles[replica]]
        yield (
            f'<rect x="{x + 1}" y="{y + 1}" width="{COLUMN - 2}" height="{ROW - 2}" rx="3" '
            f'fill="{colour}"/>'
        )
        yield f'<text {middle} font-size="11">{record.contributions[replica]}</text>'
    elif replica in record.failed:
        yield (
            f'<rect x="{x + 1}" y="{y + 1}" width="{COLUMN - 2}" height="{ROW - 2}" rx="3" '
            f'fill="white" stroke="{RED}"/>'
        )
        yield f'<text {middle} fill="{RED}" font-weight="bold">&#215;</text>'


def legend(run: RunRecord, y: float) -> Iterator[str]:
    """Name the colours that occur."""
    seen = {role for record in run.steps for role in record.roles.values()}
    x = float(LEFT)
    for role in COLOURS:
        if role not in seen:
            continue
        yield f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="3" fill="{COLOURS[role]}"/>'
        yield text(x + 20, y, role.replace("_", "-"))
        x += 46 + 7 * len(role)
    yield text(x, y, "numbers: microbatches contributed to the step", f'fill="{PALE}"')


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
