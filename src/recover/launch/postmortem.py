"""Speak for a rank that could not: it was hit by a fatal signal. Layer: launch."""

from pathlib import Path

from recover.launch import layout, note

_FATAL = "Fatal Python error: "


def of_crash(control: Path, out: Path, world_rank: int) -> note.EndNote | None:
    """Write the end note of a rank that crashed, and append what Python said to its log.

    None where Python said nothing: then the rank was killed from outside.
    """
    try:
        said = layout.crash_file(control, world_rank).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    first, _, _ = said.partition("\n")
    if not first.startswith(_FATAL):
        return None
    log = layout.rank_log(out, world_rank)
    reason = f"crashed: {first.removeprefix(_FATAL)}"
    ended = note.EndNote(note.FAILED, reason, None, log.stat().st_size, finished=False)
    note.write(layout.end_file(control, world_rank), ended)
    with log.open("a", encoding="utf-8") as file:
        file.write(said)
    return ended
