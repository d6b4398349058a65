"""Records are whole whoever writes them: handover between dying writers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.core.policies import RestoreChoice
from recover.errors import RecoverError
from recover.records import (
    EventRecord,
    RecordWriter,
    StepRecord,
    config_text,
    read_run,
    to_json,
    write_config,
)

STEP = StepRecord(
    step=0,
    loss=1.0,
    microbatches=1,
    contributions={0: 1},
    ids={0: (0,)},
    epoch=0,
    survivors=(0,),
    accumulation=1,
    roles={0: "major"},
    boundary=False,
    failed=(),
    tokens=1,
    wall_s=0.0,
    sync_s=0.0,
    recovery_s=0.0,
    time=0.0,
)
EVENT = EventRecord(
    step=0,
    location="reduce",
    replicas=(),
    ranks=(),
    boundary=False,
    promoted=(),
    extra={},
    restored_buckets=(),
    mode="skip",
    detect_s=0.0,
    repair_s=0.0,
    restore_s=0.0,
    extra_s=0.0,
    total_s=0.0,
    epoch=0,
    time=0.0,
)


def step(number: int, size: int = 1) -> StepRecord:
    return replace(STEP, step=number, ids={0: tuple(range(size))})


def event(number: int, epoch: int) -> EventRecord:
    return replace(EVENT, step=number, epoch=epoch)


def on_file(directory: Path) -> list[int]:
    path = directory / "steps.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def recoveries_on_file(directory: Path) -> list[tuple[int, int]]:
    path = directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(loaded["step"], loaded["epoch"]) for loaded in map(json.loads, lines)]


# --- told as stories -----------------------------------------------------------------------


def test_only_the_lowest_survivor_writes(tmp_path: Path) -> None:
    writers = [RecordWriter(tmp_path, replica) for replica in range(3)]
    writers[2].commit(step(0), (0, 1, 2))
    writers[1].commit(step(0), (0, 1, 2))
    assert on_file(tmp_path) == []
    writers[0].commit(step(0), (0, 1, 2))
    assert on_file(tmp_path) == [0]


def test_a_writer_that_dies_before_it_writes_is_made_up_for(tmp_path: Path) -> None:
    first, second, third = (RecordWriter(tmp_path, replica) for replica in range(3))
    for writer in (first, second, third):
        writer.commit(step(0), (0, 1, 2))
    second.commit(step(1), (0, 1, 2))  # replica 0 commits step 1 and dies at once
    third.commit(step(1), (0, 1, 2))
    third.commit(step(2), (1, 2), [event(2, 1)])  # replica 1 commits step 2 and dies at once
    assert on_file(tmp_path) == [0]
    third.commit(step(3), (2,), [event(3, 2)])
    assert on_file(tmp_path) == [0, 1, 2, 3]
    assert recoveries_on_file(tmp_path) == [(2, 1), (3, 2)]


def test_a_writer_that_dies_after_it_has_written_is_not_repeated(tmp_path: Path) -> None:
    first, second = RecordWriter(tmp_path, 0), RecordWriter(tmp_path, 1)
    first.commit(step(0), (0, 1), [event(0, 1)])
    second.commit(step(0), (0, 1), [event(0, 1)])
    second.commit(step(1), (1,), [event(1, 2)])
    assert on_file(tmp_path) == [0, 1]
    assert recoveries_on_file(tmp_path) == [(0, 1), (1, 2)]


def test_a_writer_that_dies_between_its_two_files(tmp_path: Path) -> None:
    first, second = RecordWriter(tmp_path, 0), RecordWriter(tmp_path, 1)
    for writer in (first, second):
        writer.commit(step(0), (0, 1), [event(0, 1)])
    (tmp_path / "steps.jsonl").write_text("")  # only the recovery got out
    second.commit(step(1), (1,))
    assert on_file(tmp_path) == [0, 1]
    assert recoveries_on_file(tmp_path) == [(0, 1)]


@pytest.mark.parametrize("size", [1, 5000, 40_000])
@pytest.mark.parametrize("left", [0.0, 0.01, 0.5, 0.99])
def test_a_torn_line_is_removed_and_written_again(tmp_path: Path, size: int, left: float) -> None:
    first, second = RecordWriter(tmp_path, 0), RecordWriter(tmp_path, 1)
    for number in range(3):
        for writer in (first, second):
            writer.commit(step(number, size), (0, 1))
    path = tmp_path / "steps.jsonl"
    line = len(to_json(step(2, size))) + 1
    os.truncate(path, path.stat().st_size - line + int(left * line))
    second.commit(step(3, size), (1,))
    assert on_file(tmp_path) == [0, 1, 2, 3]


def test_a_torn_first_line_leaves_an_empty_file(tmp_path: Path) -> None:
    second = RecordWriter(tmp_path, 1)
    (tmp_path / "steps.jsonl").write_text('{"step"')
    second.commit(step(0), (0, 1))
    second.commit(step(1), (1,))
    assert on_file(tmp_path) == [0, 1]


def test_the_last_step_survives_a_death_after_the_last_commit(tmp_path: Path) -> None:
    first, second, third = (RecordWriter(tmp_path, replica) for replica in range(3))
    for writer in (first, second, third):
        writer.commit(step(0), (0, 1, 2))
    second.commit(step(1), (0, 1, 2))
    third.commit(step(1), (0, 1, 2))
    second.flush_final((0, 1, 2))
    assert on_file(tmp_path) == [0]
    third.flush_final((1, 2), [event(2, 1)])
    assert on_file(tmp_path) == [0]
    third.flush_final((2,), [event(2, 2)])
    assert on_file(tmp_path) == [0, 1]
    assert recoveries_on_file(tmp_path) == [(2, 1), (2, 2)]


def test_a_flush_at_the_end_writes_nothing_twice(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, 0)
    writer.flush_final((0, 1))
    writer.commit(step(0), (0, 1), [event(0, 1)])
    writer.flush_final((0, 1))
    writer.flush_final((0,))
    writer.close()
    writer.close()
    assert on_file(tmp_path) == [0]
    assert recoveries_on_file(tmp_path) == [(0, 1)]


def test_what_is_on_file_is_forgotten(tmp_path: Path) -> None:
    writers = [RecordWriter(tmp_path, replica) for replica in range(2)]
    for number in range(100):
        for writer in writers:
            writer.commit(step(number), (0, 1), [event(number, number)])
    for writer in writers:
        assert writer._kept_steps == [step(99)]
        assert writer._kept_events == [event(99, 99)]


def test_a_writer_that_was_excluded_writes_nothing(tmp_path: Path) -> None:
    first, second = RecordWriter(tmp_path, 0), RecordWriter(tmp_path, 1)
    for writer in (first, second):
        writer.commit(step(0), (0, 1))
    second.commit(step(1), (0, 1))  # replica 0 commits step 1 and is stopped before it writes
    second.commit(step(2), (1,))
    with pytest.raises(RecoverError, match="the job went on without this replica"):
        first.commit(step(1), (0, 1))
    assert on_file(tmp_path) == [0, 1, 2]


def test_a_writer_that_was_excluded_before_its_first_line_writes_nothing(tmp_path: Path) -> None:
    second = RecordWriter(tmp_path, 1)
    second.commit(step(0), (0, 1))
    second.commit(step(1), (1,))
    with pytest.raises(RecoverError, match="already has step 1, replica 0 is about to write"):
        RecordWriter(tmp_path, 0).commit(step(0), (0, 1))
    assert on_file(tmp_path) == [0, 1]


# --- the directory -------------------------------------------------------------------------


def test_settings_are_written_as_plain_values(tmp_path: Path) -> None:
    write_config(tmp_path, {"restore": RestoreChoice.AUTO, "text": (tmp_path,), "faults": None})
    loaded = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert loaded == {"restore": "auto", "text": [str(tmp_path)], "faults": None}


def test_settings_are_written_once(tmp_path: Path) -> None:
    write_config(tmp_path, {"microbatches": 1})
    write_config(tmp_path, {"microbatches": 2})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"microbatches": 1}
    with pytest.raises(ValueError, match="not plain data"):
        config_text({"model": object()})


def test_the_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    RecordWriter(tmp_path, 0).commit(step(0), (0,))
    with pytest.raises(RecoverError, match="already has step 0"):
        RecordWriter(tmp_path, 0).commit(step(0), (0,))
    assert on_file(tmp_path) == [0]


def test_a_run_may_go_on_where_it_stopped(tmp_path: Path) -> None:
    RecordWriter(tmp_path, 0).commit(step(0), (0,))
    RecordWriter(tmp_path, 0).commit(step(1), (0,))
    assert on_file(tmp_path) == [0, 1]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecoverError, match=r"cannot write to .*file"):
        write_config(tmp_path / "file", {})
    with pytest.raises(RecoverError, match=r"cannot write to .*steps.jsonl: No such file"):
        RecordWriter(tmp_path / "nowhere", 0).commit(step(0), (0,))


def test_a_broken_last_line_is_not_built_upon(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("{}\n")
    with pytest.raises(RecoverError, match=r"steps.jsonl: the last line is broken: the key 'step'"):
        RecordWriter(tmp_path, 0).commit(step(0), (0,))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_an_error_and_recoveries_are_written_before_their_step(
    tmp_path: Path,
) -> None:
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(RecoverError, match="No space left on device"):
        RecordWriter(tmp_path, 0).commit(step(0), (0,), [event(0, 1)])
    assert recoveries_on_file(tmp_path) == [(0, 1)]


# --- a job whose writers die at any moment -------------------------------------------------


class Job:
    """Replicas that commit together and die at random, the writer in the middle of its lines too.

    The rule of the protocol is kept: a survivor of step s + 1 has returned from ``commit`` of s.
    """

    def __init__(self, directory: Path, replicas: int, seed: int) -> None:
        self.directory = directory
        self.random = Random(seed)
        self.risk = self.random.choice((0.05, 0.2, 0.5))
        self.writers = {r: RecordWriter(directory, r) for r in range(replicas)}
        self.alive = sorted(self.writers)
        self.epoch = 0
        self.recoveries: list[tuple[int, int]] = []

    def run(self, steps: int) -> None:
        for number in range(steps):
            events = self.repair(number)
            self.commit(number, events)
        while True:
            before = len(self.writers)
            events = self.repair(steps)
            self.flush(events)
            if len(self.writers) == before:
                return

    def commit(self, number: int, events: list[EventRecord]) -> None:
        self.everywhere(lambda writer: writer.commit(step(number), self.alive, events))

    def flush(self, events: list[EventRecord]) -> None:
        self.everywhere(lambda writer: writer.flush_final(self.alive, events))

    def repair(self, number: int) -> list[EventRecord]:
        """Let some die before the verdict; return the recoveries that follow."""
        events = []
        died = len(self.writers) < len(self.alive)
        while died or (len(self.writers) > 1 and self.random.random() < self.risk):
            if not died:
                del self.writers[self.random.choice(sorted(self.writers))]
            self.epoch += 1
            events.append(event(number, self.epoch))
            self.recoveries.append((number, self.epoch))
            died = False
        self.alive = sorted(self.writers)
        return events

    def everywhere(self, tell: Callable[[RecordWriter], None]) -> None:
        """Tell all survivors, in any order; some die before, in the middle of it, or after."""
        order = self.random.sample(self.alive, len(self.alive))
        for replica in order:
            dies = len(self.writers) > 1 and self.random.random() < self.risk
            moment = self.random.choice(("before", "within", "after")) if dies else None
            before = self.sizes()
            if moment != "before":
                tell(self.writers[replica])
            if moment == "within":
                self.tear(before)
            if moment:
                self.writers.pop(replica).close()

    def sizes(self) -> tuple[int, int]:
        paths = (self.directory / "events.jsonl", self.directory / "steps.jsonl")
        events, steps = (path.stat().st_size if path.exists() else 0 for path in paths)
        return events, steps

    def tear(self, before: tuple[int, int]) -> None:
        """Keep a random part of what was just written; recoveries are written first."""
        events, steps = (now - then for now, then in zip(self.sizes(), before, strict=True))
        kept = self.random.randint(0, events + steps)
        for name, then, wrote in (("events", before[0], events), ("steps", before[1], steps)):
            if wrote > 0:
                os.truncate(self.directory / f"{name}.jsonl", then + min(kept, wrote))
            kept = max(0, kept - max(0, wrote))


@given(st.integers(1, 7), st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_and_nothing_stands_twice(replicas: int, steps: int, seed: int) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        write_config(directory, {"microbatches": 1})
        job = Job(directory, replicas, seed)
        job.run(steps)
        run = read_run(directory)
        assert run.problems == ()
        assert [record.step for record in run.steps] == list(range(steps))
        assert [(record.step, record.epoch) for record in run.events] == job.recoveries
        for writer in job.writers.values():
            writer.close()


# --- a real death --------------------------------------------------------------------------

VICTIM = """
import sys
from dataclasses import replace
from pathlib import Path
from recover.records import RecordWriter, StepRecord, from_json
writer = RecordWriter(Path(sys.argv[1]), 0)
template = from_json(StepRecord, sys.stdin.readline())
for number in range(1_000_000):
    print(number, flush=True)
    writer.commit(replace(template, step=number), (0, 1))
"""


@pytest.mark.parametrize("after", [1, 40])
def test_a_writer_that_is_killed_while_it_writes(tmp_path: Path, after: int) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert victim.stdin is not None
    assert victim.stdout is not None
    survivor = RecordWriter(tmp_path, 1)
    try:
        victim.stdin.write(to_json(step(0, 30_000)) + "\n")
        victim.stdin.flush()
        committed = 0
        for line in victim.stdout:  # ends when the victim is dead
            committed = int(line)
            survivor.commit(step(committed, 30_000), (0, 1))
            if committed == after:
                victim.send_signal(signal.SIGKILL)
    finally:
        victim.kill()
        victim.wait(timeout=20)
        victim.stdin.close()
        victim.stdout.close()
    survivor.commit(step(committed + 1, 30_000), (1,))
    assert on_file(tmp_path) == list(range(committed + 2))
