"""What the benchmarks share: ranks under a deadline, results in files, and their spread.

A benchmark is two modules. ``X.py`` is run by hand, starts ranks with the product's own launcher
and prints; ``X_ranks.py`` runs on every rank and leaves its result in a file.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from recover.launch import LaunchSpec, command, launch, layout, rank
from recover.launch.display import PlainDisplay

ROOT = Path(__file__).resolve().parents[1]


# --- on the side of the launcher -----------------------------------------------------------


def describe_machine() -> str:
    """Return what a reader must know before believing the numbers."""
    load, cores = os.getloadavg()[0], command.available_cores()
    busy = ", BUSY WITH OTHER THINGS: do not trust what follows" if load > 1 else ""
    return f"{cores} cores, load average {load:.1f} before the start{busy}"


@contextmanager
def finished_run(
    module: str,
    arguments: Mapping[str, Any],
    *,
    replicas: int,
    ranks_per_replica: int = 1,
    deadline_s: float,
    faults: str | None = None,
) -> Iterator[Path]:
    """Run ``benchmarks.<module>`` on every rank; give its run directory while that is needed.

    Nothing stays behind, whatever happens. Ends the benchmark where the job does not finish.
    """
    _let_ranks_import_us()
    with tempfile.TemporaryDirectory(prefix="recover-bench-") as folder:
        schedule = None if faults is None else Path(folder) / "faults.yaml"
        if schedule is not None:
            schedule.write_text(faults or "", encoding="utf-8")
        spec = LaunchSpec(
            script=Path(__file__).with_name(f"{module}.py"),
            args=(json.dumps(arguments),),
            replicas=replicas,
            ranks_per_replica=ranks_per_replica,
            out=Path(folder) / "run",
            faults=schedule,
        )
        with open(os.devnull, "w") as silence, _deadline(deadline_s):
            outcome = launch(spec, PlainDisplay(silence))
        if outcome.status:
            logs = [layout.rank_log(spec.out, end.world_rank) for end in outcome.ends[:1]]
            text = "".join(log.read_text(errors="replace")[-3000:] for log in logs)
            raise SystemExit(f"{outcome.block()}\n{text}")
        yield spec.out


def results(out: Path) -> dict[int, Any]:
    """Return what each rank left in a run directory."""
    files = {int(path.stem.split("-")[1]): path for path in out.glob("result-*.json")}
    return {number: json.loads(files[number].read_text()) for number in sorted(files)}


def _let_ranks_import_us() -> None:
    told = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in told:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, told)])


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """End the job as SIGTERM would if it takes longer."""

    def expire(_: int, __: FrameType | None) -> None:
        print(f"benchmark: no end after {seconds:g} s, giving up", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- on the side of a rank -----------------------------------------------------------------


def arguments() -> dict[str, Any]:
    """Return what :func:`finished_run` was given for the ranks."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    return told


def leave_result(value: object) -> None:
    """Leave this rank's result for :func:`results`."""
    me = rank.context()
    assert me is not None, "a rank runs this"
    (me.out / f"result-{me.world_rank}.json").write_text(json.dumps(value))


# --- numbers -------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100 * len(ordered)) // 100) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def verdict(value: float, target: float, *, at_least: bool = False) -> str:
    """Return a value with its target and whether it is met."""
    met = value >= target if at_least else value <= target
    sign = ">=" if at_least else "<="
    return f"{value:.3f} (target {sign} {target:g}: {'met' if met else 'MISSED'})"
