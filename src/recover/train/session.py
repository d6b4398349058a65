"""Starts the reference trainer under the launcher and shows its progress. Layer: train."""

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from recover.launch import LaunchSpec, Outcome, run
from recover.launch.display import describe_event
from recover.train.config import TrainConfig

SCRIPT = Path(__file__).with_name("reference.py")


def run_training(
    config: TrainConfig, *, out: Path, faults: Path | None = None, title: str = "training"
) -> int:
    """Train as ``config`` says and return the exit status; records go to ``out``."""
    spec = LaunchSpec(
        script=SCRIPT,
        args=(config.to_json(),),
        replicas=config.replicas,
        ranks_per_replica=config.ranks,
        out=out,
        faults=faults,
    )
    with TrainDisplay(config, title) as display:
        status = run(spec, display)
    if status == 0:
        Console().print(f"records and logs: {out}")
    return status


class TrainDisplay:
    """One progress bar, and one line for each recovery."""

    def __init__(self, config: TrainConfig, title: str) -> None:
        self._console = Console(soft_wrap=True)
        self._steps = config.steps
        self._roles = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(title, total=config.steps, state="starting")

    def __enter__(self) -> "TrainDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_line(self, text: str) -> None:
        """Show nothing: the records say it better."""

    def on_step(self, record: Mapping[str, object]) -> None:
        """Move the bar; without a terminal, print a line now and then."""
        roles, state = describe_roles(record), describe_step(record)
        if roles != self._roles:
            self._roles = roles
            self._console.print(f"step {record['step']}: roles {roles}", highlight=False)
        done = int(str(record["step"])) + 1
        self._progress.update(self._task, completed=done, state=state)
        often = max(1, self._steps // 10)
        if not self._console.is_terminal and (done % often == 0 or done == self._steps):
            self._console.print(f"step {record['step']}: {state}", highlight=False)

    def on_event(self, record: Mapping[str, object]) -> None:
        """Say who died, where, and how long it took to go on."""
        self._console.print(f"[bold yellow]recovered[/] {describe_event(record)}", highlight=False)

    def on_notice(self, text: str) -> None:
        """Print it."""
        self._console.print(f"recover: {text}", highlight=False)

    def on_end(self, outcome: Outcome) -> None:
        """Stop the bar, so that what follows stands below it."""
        self._progress.stop()
        if outcome.status == 0:
            self._console.print(f"recover: {outcome.summary}", highlight=False)
        sys.stdout.flush()


def describe_step(record: Mapping[str, object]) -> str:
    """Return a committed step in a few words."""
    survivors, wall_s = record["survivors"], float(str(record["wall_s"]))
    assert isinstance(survivors, list)
    rate = float(str(record["tokens"])) / wall_s if wall_s > 0 else 0.0
    return (
        f"loss {float(str(record['loss'])):.4f}  world {len(survivors)}  epoch {record['epoch']}  "
        f"{rate:,.0f} tokens/s"
    )


def describe_roles(record: Mapping[str, object]) -> str:
    """Return how many replicas play which role."""
    roles = record["roles"]
    assert isinstance(roles, dict)
    names = [str(role).replace("_", "-") for role in roles.values()]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
