"""What a launch shows while it runs. Layer: launch."""

import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from recover.launch.outcome import Outcome


class Display(Protocol):
    """Is told what happens, in the launcher's thread; must not block."""

    def on_line(self, text: str) -> None:
        """Take a line that the lowest living rank printed."""

    def on_step(self, record: Mapping[str, object]) -> None:
        """Take a new line of ``steps.jsonl``."""

    def on_event(self, record: Mapping[str, object]) -> None:
        """Take a new line of ``events.jsonl``: a recovery."""

    def on_notice(self, text: str) -> None:
        """Take a sentence of the launcher itself, such as why it ended a rank."""

    def on_end(self, outcome: Outcome) -> None:
        """Take the result; the reasons of a failure are printed by the launcher."""


class PlainDisplay:
    """Plain lines: the output of the lowest living rank, and each recovery in one line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = sys.stdout if stream is None else stream

    def on_line(self, text: str) -> None:
        """Relay it."""
        self._print(text)

    def on_step(self, record: Mapping[str, object]) -> None:
        """Show nothing: the script prints what it wants to show."""

    def on_event(self, record: Mapping[str, object]) -> None:
        """Say who died, where, and how long it took to go on."""
        self._print(f"recover: {describe_event(record)}")

    def on_notice(self, text: str) -> None:
        """Print it."""
        self._print(f"recover: {text}")

    def on_end(self, outcome: Outcome) -> None:
        """Say how a job that finished fared."""
        if outcome.status == 0:
            self._print(f"recover: {outcome.summary}")

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            print(text, file=self._stream, flush=True)
        except (BrokenPipeError, ValueError):  # nobody reads any more: the job goes on
            self._stream = None


def describe_event(record: Mapping[str, object]) -> str:
    """Return a recovery as one line for people; any field may be missing."""
    died = record.get("replicas")
    names = ", ".join(str(r) for r in died) if isinstance(died, list) and died else "?"
    where = f" (noticed in {record['location']})" if record.get("location") else ""
    extra = record.get("extra")
    again = sum(extra.values()) if isinstance(extra, dict) else 0
    more = f", {again} microbatches made up for" if again else ""
    took = record.get("total_s")
    time = f", {took:.3f} s" if isinstance(took, float) else ""
    return f"step {record.get('step', '?')}: replica {names} died{where}{more}{time}"
