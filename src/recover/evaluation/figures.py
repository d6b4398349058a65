"""How figures look: one style, colours by what they stand for, PNG and SVG. Layer: evaluation.

The only importer of matplotlib beside the experiments' own drawing, which gets a figure handed.
"""

import importlib.util
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recover.errors import RecoverError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#8c8c8c",
)
"""Colours that people with a colour vision deficiency tell apart (Okabe and Ito)."""
COLOURS = {
    "reference": "#444444",
    "static": BLUE,
    "recover": BLUE,
    "ReCoVer": BLUE,
    "adaptive": ORANGE,
    "checkpoint": RED,
    "torchft": GREEN,
}
NOTE_WIDTH = 150
SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "recover",
}


PARTS = {
    "run": "#d9d9d9",
    "handling": "#999999",
    "save": "#f6c65b",
    "restart": ORANGE,
    "load": "#8f5f00",
    "rerun": RED,
    "recovery": BLUE,
    "extra": "#9ecae1",
}
"""Colours of the components of a failure."""


def style(name: str) -> dict[str, Any]:
    """Return how the line of a run looks."""
    if name == "reference":
        return {"color": "#bdbdbd", "linewidth": 3.0}
    if name in COLOURS:
        return {"color": COLOURS[name], "linewidth": 1.2}
    return {"color": GREY, "linewidth": 0.7, "linestyle": ":"}


def colour(name: str) -> str:
    """Return the colour of a contender."""
    return COLOURS.get(name.split(",")[0].split(" ")[0], GREY)


def mark_failures(axes: "Axes", at: Iterable[float]) -> None:
    """Draw a thin line where a replica was killed; the first one names them in the legend."""
    for place, x in enumerate(at):
        label = "replica killed" if place == 0 else None
        axes.axvline(x, color=RED, linewidth=0.8, linestyle=(0, (2, 2)), label=label, zorder=0)


def legend(figure: "Figure", axes: "Axes") -> None:
    """Name what the axes show, each once, right of all axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside right upper", fontsize=8)


def plain_log(axes: "Axes", *, decades_only: bool = False) -> None:
    """Make the y axis logarithmic, with numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if decades_only else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def name_bars(
    axes: "Axes", at: Sequence[float], heights: Sequence[float], names: Sequence[str]
) -> None:
    """Write a short text above each bar."""
    for x, height, name in zip(at, heights, names, strict=True):
        axes.annotate(
            name, (x, height), (0, 2), textcoords="offset points", ha="center", fontsize=7
        )


def name_bar_end(axes: "Axes", y: float, x: float, name: str) -> None:
    """Write a short text right of a lying bar."""
    axes.annotate(name, (x, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)


def check() -> None:
    """Raise RecoverError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RecoverError(
            "figures need matplotlib; install it with `pip install 'recover[evaluation]'`"
        )


def save(draw: Callable[["Figure"], None], title: str, note: str, path: Path) -> list[Path]:
    """Draw a figure and write it as PNG and SVG; ``path`` has no suffix yet.

    ``note`` is set below the figure: the settings, and whether compute was emulated.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(9.0, 4.8), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(
            "\n".join(textwrap.wrap(note, NOTE_WIDTH)),
            x=0.01,
            ha="left",
            fontsize=7.5,
            color="#555555",
        )
        draw(figure)
        paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
