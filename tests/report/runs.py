"""Runs made up by the rules of the workload, and the parts of a page about them."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from recover.core.workload import Adjustment, adjust, advance, roles_after
from recover.records import EventRecord, RunRecord, StepRecord, to_json, write_config

Deaths = Mapping[int, Sequence[tuple[int, ...]]]
"""By step, the replicas that are lost together; one recovery after another."""
PHASES_S = {"detect_s": 0.02, "repair_s": 0.01, "restore_s": 0.005, "extra_s": 0.25}
REST_S = 0.04


@dataclass
class MadeUp:
    """Writes one step after another."""

    replicas: int
    microbatches: int
    deaths: Deaths = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    next_id: int = 0

    def run(self, steps: int, **config: object) -> RunRecord:
        """Return the run after a number of steps."""
        alive = list(range(self.replicas))
        for step in range(steps):
            alive = self._step(step, alive)
        settings = {"microbatches": self.microbatches, "replicas": self.replicas, "steps": steps}
        return RunRecord(settings | config, tuple(self.steps), tuple(self.events))

    def _step(self, step: int, alive: list[int]) -> list[int]:
        layout = advance(alive, self.microbatches)
        shares = dict(layout.shares)
        roles = {r: layout.role(r) for r in alive}
        found: list[tuple[tuple[int, ...], Adjustment]] = []
        for lost in self.deaths.get(step, ()):
            alive = [r for r in alive if r not in lost]
            mended = adjust({r: shares[r] for r in alive}, self.microbatches)
            shares, roles = dict(mended.shares), roles_after(layout, mended)
            found.append((lost, mended))
        recovery_s = self._recoveries(step, found)
        ids = {}
        for r in alive:
            end = self.next_id + shares[r].contribution
            ids[r], self.next_id = tuple(range(self.next_id, end)), end
        record = StepRecord(
            step=step,
            loss=2.0 + 4.0 / (step + 1),
            microbatches=self.microbatches,
            contributions={r: shares[r].contribution for r in alive},
            ids=ids,
            epoch=len(self.events),
            survivors=tuple(alive),
            accumulation=layout.accumulation,
            roles={r: str(roles[r]) for r in alive},
            boundary=any(mended.boundary for _, mended in found),
            failed=tuple(sorted(r for lost, _ in found for r in lost)),
            tokens=self.microbatches * 100,
            wall_s=0.5 + recovery_s,
            sync_s=0.1,
            recovery_s=recovery_s,
            time=1.7e9 + step,
        )
        self.steps.append(record)
        return alive

    def _recoveries(self, step: int, found: list[tuple[tuple[int, ...], Adjustment]]) -> float:
        """Add the events of a step; each one's clock runs until the commit."""
        own_s = sum(PHASES_S.values()) + REST_S
        first = len(self.events)
        for lost, mended in found:
            event = EventRecord(
                step=step,
                location="reduce",
                replicas=lost,
                ranks=lost,
                boundary=mended.boundary,
                promoted=mended.promoted,
                extra=mended.extra,
                restored_buckets=(0,),
                mode="non_blocking",
                total_s=0.0,
                epoch=len(self.events) + 1,
                time=1.7e9 + step,
                **PHASES_S,
            )
            self.events.append(event)
        for place in range(first, len(self.events)):
            left = len(self.events) - place
            self.events[place] = replace(self.events[place], total_s=left * own_s)
        return len(found) * own_s


def written(directory: Path, run: RunRecord) -> Path:
    """Write a run directory and return it."""
    directory.mkdir(parents=True)
    write_config(directory, run.config)
    for name, records in (("steps", run.steps), ("events", run.events)):
        lines = "".join(f"{to_json(record)}\n" for record in records)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return directory


class Page:
    """The body of a page, which is well-formed XML too."""

    def __init__(self, text: str) -> None:
        body = text.split("<body>")[1].split('<div id="tip"')[0]
        self.root = ET.fromstring(f"<body>{body}</body>")

    def all(self, look: str, within: ET.Element | None = None) -> list[ET.Element]:
        """Return the elements that have all of these classes, in order."""
        wanted = set(look.split())
        elements = (self.root if within is None else within).iter()
        return [e for e in elements if wanted <= set(e.get("class", "").split())]

    def facts(self, card: int = 0) -> dict[str, str]:
        """Return the numbers of a card."""
        names = list(self.root.iter("article"))[card].iter("div")
        return {text_of(pair[0]): text_of(pair[1]) for pair in names}

    def table(self, *head: str) -> list[list[str]]:
        """Return the rows of the first table with these headings."""
        for table in self.root.iter("table"):
            if [text_of(cell) for cell in table.iter("th")] == list(head):
                return [[text_of(cell) for cell in row] for row in table.findall("tbody/tr")]
        raise AssertionError(f"no table has the headings {head}")

    def chart(self, name: str) -> ET.Element:
        """Return the figure of this name."""
        found = [f for f in self.root.iter("figure") if text_of(f[0][0]) == name]
        assert len(found) == 1, f"{len(found)} charts are called {name}"
        return found[0]


def text_of(element: ET.Element) -> str:
    """Return all text in an element."""
    return " ".join("".join(element.itertext()).split())


def points_of(path: ET.Element) -> list[tuple[float, float]]:
    """Return the points of a curve."""
    return [
        (float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path.get("d", ""))
    ]
