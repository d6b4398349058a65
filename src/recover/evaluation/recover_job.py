"""ReCoVer itself, and its strawman: `recover train` with a fault schedule. Layer: evaluation.

The run directory is ``run`` in the contender's directory; a trace is read out of it.

Moments: ``failure`` (from the last line that the victim wrote into its log, right before its
SIGKILL) and ``recovered`` (the step that it hit is committed; the event's times are its facts).
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from recover.core.schedule import Fault, FaultSchedule, Location
from recover.errors import RecoverError
from recover.evaluation import recipe
from recover.evaluation.contender import Commit, Moment, Task, Trace
from recover.evaluation.crew import Crew
from recover.evaluation.journal import Line
from recover.faults import dump
from recover.launch import layout
from recover.records import RunRecord, StepRecord, check_run, read_run
from recover.train.config import TrainConfig

RUN = "run"
_POLICIES = {"recover": "static", "adaptive": "adaptive"}
_OPTIONS = (
    "replicas",
    "microbatches",
    "steps",
    "preset",
    "sequences",
    "seed",
    "learning_rate",
    "policy",
    "bucket_mb",
    "microbatch_ms",
    "bandwidth_mbps",
)


def run(
    contender: str,
    task: Task,
    out: Path,
    *,
    deadline_s: float,
    on_commit: Callable[[Commit], None],
) -> Trace:
    """Run ``recover`` or ``adaptive``; see ``contender.run``."""
    config = replace(
        recipe.train_config(task, _POLICIES[contender]),
        overlap=bool(task.bandwidth_mbps),  # real reductions leave no core for backward here
    )
    directory = out.absolute() / RUN

    def on_line(line: Line) -> None:
        survivors = line["survivors"]
        assert isinstance(survivors, list), survivors
        values = {key: line[key] for key in ("step", "loss", "microbatches", "tokens", "time")}
        on_commit(Commit(**values, devices=len(survivors)))  # type: ignore[arg-type]

    crew = Crew(
        out,
        deadline_s=deadline_s,
        ranks=task.replicas,
        on_line=on_line,
        followed=directory / "steps.jsonl",
    )
    with crew:
        words = _train(config, directory)
        if task.kills:
            schedule = crew.out / "faults.yaml"
            schedule.write_text(dump(faults(task)), encoding="utf-8")
            words += ["--faults", str(schedule)]
        crew.finish(train=crew.start("train", words))
    record = read_run(directory)
    problems = check_run(record)
    if problems:
        raise RecoverError(f"{directory} breaks the invariant: {problems[0]}")
    added = {"policy": config.policy, "overlap": config.overlap, "run": RUN}
    return _trace(contender, record, directory, task, recipe.settings(task) | added)


def faults(task: Task) -> FaultSchedule:
    """Return the task's kills as ReCoVer's trainer takes them."""
    bucket = recipe.DEADLY_BUCKET
    deaths = (
        Fault(kill.step, kill.replica, rank=0, location=Location.REDUCE, bucket=bucket)
        for kill in sorted(task.kills)
    )
    return FaultSchedule(tuple(deaths))


def _train(config: TrainConfig, directory: Path) -> list[str]:
    words = [sys.executable, "-c", "from recover.cli import app; app()", "train"]
    for name in _OPTIONS:
        words += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    words += ["--overlap"] if config.overlap else []
    return [*words, "--out", str(directory)]


def _trace(
    contender: str,
    record: RunRecord,
    directory: Path,
    task: Task,
    settings: dict[str, object],
) -> Trace:
    failures = [
        Moment("failure", _death(directory, kill.replica), kill.step, {"replica": kill.replica})
        for kill in task.kills
    ]
    hit = {replica for step in record.steps for replica in step.failed}
    missed = [kill for kill in task.kills if kill.replica not in hit]
    if missed:
        raise RecoverError(f"{len(missed)} of the kills did not come, the first: {missed[0]}")
    recoveries = [
        Moment(
            "recovered",
            event.time,
            event.step,
            {
                "detect_s": event.detect_s,
                "repair_s": event.repair_s,
                "restore_s": event.restore_s,
                "extra_s": event.extra_s,
                "total_s": event.total_s,
            },
        )
        for event in record.events
    ]
    moments = sorted([*failures, *recoveries], key=lambda moment: moment.time)
    return Trace(contender, tuple(map(_commit, record.steps)), tuple(moments), settings)


def _commit(step: StepRecord) -> Commit:
    return Commit(
        step.step, step.loss, step.microbatches, step.tokens, len(step.survivors), step.time
    )


def _death(directory: Path, replica: int) -> float:
    """Return when a killed replica wrote its last line, in seconds since 1970."""
    return layout.rank_log(directory, replica).stat().st_mtime_ns / 1e9
