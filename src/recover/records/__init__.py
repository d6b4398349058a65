"""What a run leaves behind, and how to read it back. Layer: files, above the core.

A run directory is an interface: users' scripts read it. It holds

- ``config.yaml``: the settings of the run,
- ``steps.jsonl``: one :class:`StepRecord` per committed step, in order, no step twice,
- ``events.jsonl``: one :class:`EventRecord` per recovery, in order,
- ``logs/``: one log per rank.

::

    run = read_run(Path("runs/today"))
    print([record.loss for record in run.steps], check_run(run))

Every line is a JSON object whose keys are the fields of the record class, where each field's unit
and meaning stands. Replica ids that are keys are strings in JSON and integers again here.
"""

from recover.records.checks import check_run
from recover.records.reader import RunRecord, read_run
from recover.records.schema import EventRecord, StepRecord, from_json, to_json
from recover.records.writer import RecordWriter, config_text, write_config

__all__ = [
    "EventRecord",
    "RecordWriter",
    "RunRecord",
    "StepRecord",
    "check_run",
    "config_text",
    "from_json",
    "read_run",
    "to_json",
    "write_config",
]
