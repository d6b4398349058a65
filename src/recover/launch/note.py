"""How a rank ended, in its own words: one small JSON file. Layer: launch."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FINISHED = "finished"
"""The rank did everything there was to do."""
FAILED = "failed"
"""The user's code or ours raised an error."""
LEFT = "left"
"""The script ended before the training did."""
INJECTED = "injected"
"""The schedule of failures said so."""
CONDEMNED = "condemned"
"""The rank was alive, but its replica had lost another one, or the job had gone on without it."""

KINDS = (FINISHED, FAILED, LEFT, INJECTED, CONDEMNED)


@dataclass(frozen=True, slots=True)
class EndNote:
    """The last word of a rank; a later one replaces an earlier one."""

    kind: str
    reason: str
    """One line, without the rank's number, so that equal reasons can be told as one."""
    step: int | None
    log_bytes: int
    """Size of the rank's log before the details (a traceback) were appended to it."""
    finished: bool
    """Whether this or an earlier note said "finished"."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"unknown kind of end: {self.kind!r}"


def write(path: Path, note: EndNote) -> None:
    """Write ``note`` so that a reader sees all of it or none."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(note)), encoding="utf-8")
    os.replace(temporary, path)


def read(path: Path) -> EndNote | None:
    """Return the note at ``path``, or None where there is none."""
    try:
        return EndNote(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
