"""Numbers in words, with their units. Layer: report."""

import math
from datetime import UTC, datetime


def count(value: float) -> str:
    """Return a whole number with its thousands apart."""
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def seconds(value: float) -> str:
    """Return a duration with three digits that matter."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0 s"
    if value < 1:
        return f"{1000 * value:.{_decimals(1000 * value)}f} ms"
    if value < 60:
        return f"{value:.{_decimals(value)}f} s"
    if value < 3600:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    return f"{value // 3600:,.0f} h {value % 3600 // 60:.0f} min"


def number_of(things: str, number: int) -> str:
    """Return a number of things, whose plural ends in ``s``."""
    return f"{number:,} {things}{'' if number == 1 else 's'}"


def rate(per_s: float) -> str:
    """Return work per second, without the unit."""
    return f"{per_s:,.{_decimals(per_s)}f}" if math.isfinite(per_s) else "–"


def steps(first: int, last: int) -> str:
    """Name a range of steps."""
    return f"step {first:,}" if first == last else f"steps {first:,}–{last:,}"


def share(part: float, whole: float) -> str:
    """Return a part in per cent."""
    if not whole > 0:
        return "–"
    return "under 0.1 %" if 0 < part < whole / 1000 else f"{100 * part / whole:.1f} %"


def loss(value: float) -> str:
    """Return a loss."""
    return f"{value:.4f}" if math.isfinite(value) else "not a number"


def small(value: float) -> str:
    """Return a difference, whose size nobody knows beforehand."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}".replace("-", "−")
    digits, power = f"{value:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}".replace("-", "−")


def tick(value: float, distance: float) -> str:
    """Return the label of an axis whose ticks are ``distance`` apart."""
    if value == 0:
        return "0"
    if distance < 1e-3:
        return small(value)
    if distance >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value:,.{max(0, -math.floor(math.log10(distance)))}f}".replace("-", "−")


def moment(time: float) -> str:
    """Return a time since 1970."""
    if not 0 <= time < 1e11:
        return "–"
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _decimals(value: float) -> int:
    """Return how many decimals make three digits."""
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
