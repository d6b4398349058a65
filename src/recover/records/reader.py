"""Read a run directory back. Layer: files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import yaml

from recover.records.schema import EventRecord, Record, StepRecord, from_json

CONFIG = "config.yaml"
STEPS = "steps.jsonl"
EVENTS = "events.jsonl"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything that a run recorded."""

    config: Mapping[str, object]
    """The settings, as ``config.yaml`` has them."""
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    problems: tuple[str, ...] = field(default=())
    """What was skipped while reading: a last line that the end of the run cut off."""


def read_run(directory: Path) -> RunRecord:
    """Read the run in ``directory``, which may still be going on.

    A last line that was cut off is left out and named in ``problems``. Raises ValueError, with file
    and line, for anything else that is broken: a line that is no record, a step missing or twice.
    """
    config = _config(directory / CONFIG)
    steps, torn_step = _records(directory / STEPS, StepRecord, _follows_step)
    events, torn_event = _records(directory / EVENTS, EventRecord, _follows_event)
    return RunRecord(config, steps, events, torn_step + torn_event)


def _config(path: Path) -> Mapping[str, object]:
    try:
        loaded: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read {path.name} ({error.strerror})"
        raise ValueError(f"{path.parent} is not a run directory: {what}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {loaded!r:.60}")
    return cast(dict[str, object], loaded)


def _records(
    path: Path, kind: type[Record], follows: Callable[[Record, Record], str | None]
) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """Return the records of a file, and what was wrong with a last line that was cut off."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        raise ValueError(f"{path}: cannot read it: {error.strerror}") from None
    records: list[Record] = []
    for number, line in enumerate([*lines, rest] if rest else lines, start=1):
        where = f"{path}, line {number}"
        try:
            record = from_json(kind, line)
        except ValueError as error:
            if number > len(lines):
                return tuple(records), (f"{where}: cut off in the middle, left out",)
            raise ValueError(f"{where}: {error}") from None
        wrong = follows(records[-1], record) if records else None
        if wrong:
            raise ValueError(f"{where}: {wrong}")
        records.append(record)
    return tuple(records), ()


def _follows_step(before: StepRecord, after: StepRecord) -> str | None:
    if after.step == before.step + 1:
        return None
    return f"step {after.step} after step {before.step}, expected step {before.step + 1}"


def _follows_event(before: EventRecord, after: EventRecord) -> str | None:
    if after.step >= before.step and after.epoch > before.epoch:
        return None
    return (
        f"recovery in step {after.step}, epoch {after.epoch} "
        f"after one in step {before.step}, epoch {before.epoch}"
    )
