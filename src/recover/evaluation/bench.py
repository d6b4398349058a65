"""``recover bench``: makes the runs of an experiment, keeps their traces, writes what they say.

Layer: evaluation. Everything impure of the experiments is here. A run whose trace is on file is not
made again: an interrupted series goes on where it stopped, and experiments share equal runs.

    DIR/raw/KEY.jsonl       the trace of a run
    DIR/failed/KEY          the files of a run that failed
    DIR/NAME.csv .png .svg  an experiment's rows and figure
    DIR/NAME.md             its section of a report
"""

import csv
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from recover.errors import RecoverError
from recover.evaluation import figures, report_section
from recover.evaluation.contender import Commit, Trace
from recover.evaluation.experiments import EXPERIMENTS
from recover.evaluation.experiments.protocol import Experiment, Row, Run, Size

OPTIONS = frozenset(field.name for field in fields(Size)) - {"variants"}
"""Sizes that a caller may replace."""
PATIENCE, GRACE_S = 5.0, 180.0
"""A run may take this many times its estimate and so much more."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A series of experiments. Raises ValueError for a setting that cannot be."""

    experiments: tuple[Experiment, ...]
    out: Path
    quick: bool = False
    sizes: Mapping[str, object] = field(default_factory=dict)
    """Options that replace those of the full or quick size."""

    @property
    def command(self) -> str:
        """How to make all of this again, without the experiment's name."""
        words = ["--quick"] if self.quick else []
        for name, value in self.sizes.items():
            option = f"--{'interval' if name == 'intervals' else name.replace('_', '-')}"
            values = value if isinstance(value, tuple) else (value,)
            words += [f"{option} {one}" for one in values]
        return " ".join(words)

    def plan(self, experiment: Experiment) -> Mapping[str, Run]:
        """Return the runs of an experiment."""
        size = experiment.quick if self.quick else experiment.full
        changed: Size = replace(size, **self.sizes)  # type: ignore[arg-type]
        return experiment.plan(changed)

    def trace_file(self, run: Run) -> Path:
        """Return where the trace of a run is kept."""
        return self.out / "raw" / f"{run.key}.jsonl"


def chosen(name: str) -> tuple[Experiment, ...]:
    """Return the experiment of this name, or every one for ``all``."""
    if name == "all":
        return tuple(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        raise ValueError(
            f"unknown experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}, all"
        )
    return (EXPERIMENTS[name],)


def run_bench(bench: Bench, console: Console | None = None) -> None:
    """Make the missing runs and write every experiment's files as soon as it is complete.

    Raises RecoverError where a run failed, after the experiments that do not need it; what is on
    file stays, and the next call goes on from there.
    """
    shown = console or Console()
    figures.check()
    plans = {experiment.name: bench.plan(experiment) for experiment in bench.experiments}
    runs = {run.key: run for plan in plans.values() for run in plan.values()}
    missing = [run for run in runs.values() if not bench.trace_file(run).exists()]
    estimate_s = sum(run.estimate_s for run in missing)
    shown.print(
        f"{len(runs)} runs, {len(runs) - len(missing)} on file; the others take about "
        f"{_duration(estimate_s)}. Traces: {bench.out / 'raw'}",
        highlight=False,
        markup=False,
    )
    left_out: dict[str, str] = {}
    failed: list[str] = []
    with _progress(shown, estimate_s) as bar:
        for experiment in bench.experiments:
            plan = plans[experiment.name]
            try:
                for run in plan.values():
                    if run.key not in left_out:
                        _make(bench, experiment, run, bar, left_out)
                _write(bench, experiment, plan, left_out, shown)
            except (RecoverError, ValueError) as error:
                failed.append(f"{experiment.name}: {error}")
    if failed:
        raise RecoverError("; ".join(failed))


def _make(
    bench: Bench, experiment: Experiment, run: Run, bar: "Bar", left_out: dict[str, str]
) -> None:
    """Make a run unless its trace is on file."""
    file, work = bench.trace_file(run), bench.out / "work" / run.key
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)  # what an interrupted series left of this run
    deadline_s = GRACE_S + PATIENCE * run.estimate_s
    around = surroundings()
    with bar.run(experiment, run) as on_commit:
        try:
            trace = run.perform(work, deadline_s=deadline_s, on_commit=on_commit)
        except RecoverError as error:
            if not run.optional:
                kept = _set_aside(work)
                raise RecoverError(f"{run.key}: {error}; now in {kept}") from error
            left_out[run.key] = str(error)
            return
    replace(trace, settings={**trace.settings, **around}).save(file)
    shutil.rmtree(work, ignore_errors=True)


def _set_aside(work: Path) -> Path:
    """Keep the files of a run that failed from the next try, which begins anew."""
    kept = work.parent.parent / "failed" / work.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(exist_ok=True)
    work.rename(kept)
    return kept


def _write(
    bench: Bench,
    experiment: Experiment,
    plan: Mapping[str, Run],
    left_out: Mapping[str, str],
    console: Console,
) -> None:
    """Write an experiment's rows, figure and section, and show its table."""
    traces = {
        name: Trace.load(bench.trace_file(run))
        for name, run in plan.items()
        if run.key not in left_out
    }
    rows = experiment.rows(traces)
    path = bench.out / experiment.name
    write_csv(rows, path.with_suffix(".csv"))
    reasons = sorted({left_out[run.key] for run in plan.values() if run.key in left_out})
    circumstances = report_section.Circumstances(
        command=f"recover bench {experiment.name} {bench.command}".rstrip(),
        left_out=[f"Left out: {reason}" for reason in reasons],
    )
    text = report_section.section(experiment, rows, traces, circumstances)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    note = f"{report_section.settings(traces)}"
    figures.save(lambda figure: experiment.draw(figure, rows), experiment.title, note, path)
    console.print(_shown(experiment, rows))
    for sentence in (*experiment.words(rows), *circumstances.left_out):
        console.print(f"  {sentence}", highlight=False, markup=False)


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Write rows with one column for every name in them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def surroundings() -> dict[str, object]:
    """Return what a reader must know of machine and day before believing a run's numbers."""
    return {
        "machine": f"{len(os.sched_getaffinity(0))} cores ({platform.machine()})",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def explain(console: Console | None = None) -> None:
    """Show every experiment with its figures of the paper and the time of its full size."""
    table = Table("name", "figures of the paper", "full", "quick", "what is run (more in NAME.md)")
    for experiment in EXPERIMENTS.values():
        times = [
            _duration(sum(run.estimate_s for run in experiment.plan(size).values()))
            for size in (experiment.full, experiment.quick)
        ]
        first_sentence = f"{experiment.explanation.split('. ')[0]}."
        table.add_row(experiment.name, experiment.paper or "-", *times, first_sentence)
    (console or Console()).print(table)


def _shown(experiment: Experiment, rows: Sequence[Row]) -> Table:
    lines = experiment.table(rows)
    names = list(dict.fromkeys(name for line in lines for name in line))
    table = Table(*names, title=experiment.title)
    for line in lines:
        table.add_row(*(report_section.shown(line.get(name)) for name in names))
    return table


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class Bar:
    """The progress bar, in seconds of the estimate."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    @contextmanager
    def run(self, experiment: Experiment, run: Run) -> Iterator["Advance"]:
        """Name a run while it is made; give what is told of each commit."""
        self._progress.update(self._task, description=f"{experiment.name}: {run.key}")
        advance = Advance(self._progress, self._task, run)
        yield advance
        advance.finish()


class Advance:
    """Moves the bar with every commit, and at the end of the run to where it must be."""

    def __init__(self, progress: Progress, task: TaskID, run: Run) -> None:
        self._progress, self._task, self._left_s = progress, task, run.estimate_s
        self._per_commit_s = run.estimate_s / (run.steps + 1)

    def __call__(self, commit: Commit) -> None:
        """Take a commit."""
        self._move(min(self._per_commit_s, self._left_s))

    def finish(self) -> None:
        """Move by what is left of the run."""
        self._move(self._left_s)

    def _move(self, seconds: float) -> None:
        self._left_s -= seconds
        self._progress.advance(self._task, seconds)


@contextmanager
def _progress(console: Console, total_s: float) -> Iterator[Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    idle = not total_s  # everything is on file
    with Progress(*columns, console=console, speed_estimate_period=600, disable=idle) as progress:
        yield Bar(progress, progress.add_task("", total=total_s))
