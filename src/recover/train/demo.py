"""The demonstration: the same training twice, undisturbed and under fire. Layer: train."""

import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recover.core.schedule import Fault, FaultSchedule, Location
from recover.errors import RecoverError
from recover.faults import dump
from recover.records import RunRecord, check_run, read_run
from recover.train.config import TrainConfig
from recover.train.session import run_training

REFERENCE, DISTURBED = "reference", "recover"
CONFIG = TrainConfig(replicas=4, microbatches=16, steps=30, bucket_mb=0.5)  # several buckets
FAULTS = FaultSchedule(
    (
        Fault(step=8, replica=2, rank=0, location=Location.REDUCE, bucket=1),
        Fault(step=15, replica=0, rank=0, location=Location.BACKWARD),
        Fault(step=22, replica=3, rank=0, location=Location.REDUCE, bucket=2),
    )
)


def run_demo(out: Path) -> int:
    """Run the demonstration in ``out``, replacing an earlier one, and print what it showed.

    Returns the exit status: 0 only if both runs finished and the records hold the invariant.
    """
    console = Console()
    _clear(out)
    out.mkdir(parents=True, exist_ok=True)
    faults = out / "faults.yaml"
    faults.write_text(dump(FAULTS), encoding="utf-8")
    console.print(
        f"Training a LLaMA-style model on real text, twice: {CONFIG.replicas} replicas, "
        f"B = {CONFIG.microbatches} microbatches per step, {CONFIG.steps} steps.\n"
        f"The second time, three replicas are killed (SIGKILL): {faults}",
        highlight=False,
    )
    for name, schedule in ((REFERENCE, None), (DISTURBED, faults)):
        status = run_training(CONFIG, out=out / name, faults=schedule, title=f"{name:9s}")
        if status:
            return status
    reference, disturbed = read_run(out / REFERENCE), read_run(out / DISTURBED)
    console.print(comparison(reference, disturbed))
    problems = [*check_run(reference), *check_run(disturbed)]
    for problem in problems:
        console.print(f"[red]invariant broken[/]: {problem}", highlight=False)
    return 1 if problems else 0


def comparison(reference: RunRecord, disturbed: RunRecord) -> Table:
    """Return the table that sets the two runs side by side."""
    table = Table(title="ReCoVer: the same training, undisturbed and with 3 of 4 replicas killed")
    table.add_column("")
    table.add_column(REFERENCE, justify="right")
    table.add_column(DISTURBED, justify="right")
    both = (reference, disturbed)

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("steps committed", *(str(len(run.steps)) for run in both))
    row("replicas at the end", *(str(len(run.steps[-1].survivors)) for run in both))
    row("microbatches per step", *(_range({s.microbatches for s in run.steps}) for run in both))
    row("last loss", *(f"{run.steps[-1].loss:.6f}" for run in both))
    row("largest loss difference", "", f"{largest_difference(reference, disturbed):.2e}")
    losses = [event.detect_s + event.repair_s + event.restore_s for event in disturbed.events]
    row("time lost per failure", "", ", ".join(f"{1000 * s:.1f} ms" for s in losses))
    again = [event.extra_s for event in disturbed.events]
    row("making up for the lost microbatches", "", ", ".join(f"{1000 * s:.0f} ms" for s in again))
    return table


def largest_difference(reference: RunRecord, disturbed: RunRecord) -> float:
    """Return the largest relative difference of the two runs' losses at the same step."""
    pairs = zip(reference.steps, disturbed.steps, strict=True)
    return max(abs(a.loss - b.loss) / abs(a.loss) for a, b in pairs)


def _clear(out: Path) -> None:
    """Remove an earlier demonstration; refuse to touch anything else."""
    known = {REFERENCE, DISTURBED, "faults.yaml"}
    if not out.exists():
        return
    others = sorted(p.name for p in out.iterdir() if p.name not in known) if out.is_dir() else ["."]
    if others:
        raise RecoverError(f"{out} holds something else ({others[0]}); choose another --out")
    shutil.rmtree(out)


def _range(values: set[int]) -> str:
    return str(min(values)) if len(values) == 1 else f"{min(values)} to {max(values)}"
