"""The records of a run: lines, reading, and what is checked in them."""

import ast
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest

import recover.records.schema as schema
from recover.core.workload import Role
from recover.records import (
    EventRecord,
    RunRecord,
    StepRecord,
    from_json,
    read_run,
    to_json,
    write_config,
)

from .record_samples import AFTER, CONFIG, EVENT, HIT, RUN, STEP


def left_behind(directory: Path, run: RunRecord = RUN) -> Path:
    """Write a run directory as a writer does."""
    write_config(directory, dict(run.config))
    (directory / "steps.jsonl").write_text("".join(f"{to_json(r)}\n" for r in run.steps))
    (directory / "events.jsonl").write_text("".join(f"{to_json(r)}\n" for r in run.events))
    return directory


# --- lines ---------------------------------------------------------------------------------


def test_a_step_is_one_line_with_these_keys_in_this_order() -> None:
    line = to_json(STEP)
    assert "\n" not in line
    assert " ".join(json.loads(line)) == (
        "step loss microbatches contributions ids epoch survivors accumulation roles boundary "
        "failed tokens wall_s sync_s recovery_s time"
    )
    assert json.loads(line)["ids"] == {"0": [0, 1], "1": [2, 3], "2": [4, 5]}
    assert json.loads(line)["roles"] == {"0": "major", "1": "major", "2": "major"}
    assert json.loads(to_json(AFTER))["checksum"] == "abc"


def test_a_recovery_is_one_line_with_these_keys_in_this_order() -> None:
    assert " ".join(json.loads(to_json(EVENT))) == (
        "step location replicas ranks boundary promoted extra restored_buckets mode "
        "detect_s repair_s restore_s extra_s total_s epoch time"
    )


@pytest.mark.parametrize("record", [STEP, HIT, AFTER])
def test_a_step_reads_back(record: StepRecord) -> None:
    back = from_json(StepRecord, to_json(record))
    assert back == record
    assert back.roles[0] is Role.MAJOR


def test_a_recovery_reads_back() -> None:
    assert from_json(EventRecord, to_json(EVENT)) == EVENT


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null(loss: float) -> None:
    line = to_json(replace(STEP, loss=loss))
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(from_json(StepRecord, line).loss)


def test_keys_of_later_versions_are_ignored() -> None:
    line = json.dumps(json.loads(to_json(STEP)) | {"power_w": 3})
    assert from_json(StepRecord, line) == STEP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "1"}, 'step must be a whole number from 0 on, got "1"'),
        ({"step": True}, "step must be a whole number from 0 on, got true"),
        ({"step": -1}, "step must be a whole number from 0 on, got -1"),
        ({"loss": "x"}, 'loss must be a number or null, got "x"'),
        ({"boundary": 0}, "boundary must be true or false, got 0"),
        ({"survivors": 3}, "survivors must be a list of whole numbers, got 3"),
        ({"survivors": [0, "1"]}, r'survivors must be .*, got \[0, "1"\]'),
        ({"contributions": [1]}, r"contributions must be an object with replicas as keys"),
        ({"contributions": {"a": 1}}, "contributions must be an object with replicas as keys"),
        ({"ids": {"0": 1}}, "ids must be a list of whole numbers"),
        ({"roles": {"0": "chief"}}, "roles must be one of major, minor, major_spare, minor_spare"),
        ({"checksum": 1}, "checksum must be a text, got 1"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, object], message: str) -> None:
    line = json.dumps(json.loads(to_json(STEP)) | changes)
    with pytest.raises(ValueError, match=message):
        from_json(StepRecord, line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not JSON: Expecting value at column 1"),
        ("{", "not JSON"),
        ("[1]", r"expected a JSON object, got \[1\]"),
        ("{}", "the key 'step' is missing"),
        (b"\xff\xfe\xfa", "not"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_record_is_refused(line: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(StepRecord, line)


def test_a_recovery_needs_a_known_mode() -> None:
    line = to_json(EVENT).replace("non_blocking", "sideways")
    with pytest.raises(ValueError, match="mode must be one of skip, blocking, non_blocking, got"):
        from_json(EventRecord, line)


def test_every_field_says_what_it_means() -> None:
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    for record in (StepRecord, EventRecord):
        (body,) = (
            node.body
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == record.__name__
        )
        documented = {
            field.target.id
            for field, text in pairwise(body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        }
        assert documented == {field.name for field in fields(record)}


# --- reading -------------------------------------------------------------------------------


def test_a_run_reads_back(tmp_path: Path) -> None:
    assert read_run(left_behind(tmp_path)) == RUN


def test_a_run_that_has_only_begun_has_no_steps(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    assert read_run(tmp_path) == RunRecord(CONFIG, (), ())


@pytest.mark.parametrize(("name", "kept"), [("steps.jsonl", (2, 1)), ("events.jsonl", (3, 0))])
def test_a_last_line_that_was_cut_off_is_named_and_left_out(
    tmp_path: Path, name: str, kept: tuple[int, int]
) -> None:
    path = left_behind(tmp_path) / name
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for size in (last + 1, last + 20, len(whole) - 2):
        path.write_bytes(whole[:size])
        run = read_run(tmp_path)
        assert (len(run.steps), len(run.events)) == kept
        number = whole.count(b"\n")
        assert run.problems == (f"{path}, line {number}: cut off in the middle, left out",)


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = left_behind(tmp_path) / "steps.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_run(tmp_path) == RUN


def edited(tmp_path: Path, name: str, edit: Callable[[list[str]], list[str]]) -> str:
    """Return the message that a run is refused with once the lines of a file were edited."""
    path = left_behind(tmp_path) / name
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=r".") as caught:
        read_run(tmp_path)
    return str(caught.value).removeprefix(f"{path}, ")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [lines[0], "{\n", *lines[1:]], "line 2: not JSON"),
        (lambda lines: [lines[0], "\n", *lines[1:]], "line 2: not JSON"),
        (lambda lines: [*lines[:-1], lines[-1][:30] + "\n"], "line 3: not JSON"),
        (lambda lines: [lines[0], lines[2]], "line 2: step 2 after step 0, expected step 1"),
        (lambda lines: [lines[0], *lines], "line 2: step 0 after step 0, expected step 1"),
        (lambda lines: [lines[1], lines[0]], "line 2: step 0 after step 1, expected step 2"),
    ],
)
def test_anything_else_that_is_broken_is_refused(
    tmp_path: Path, edit: Callable[[list[str]], list[str]], message: str
) -> None:
    assert edited(tmp_path, "steps.jsonl", edit).startswith(message)


def test_a_recovery_that_stands_twice_is_refused(tmp_path: Path) -> None:
    assert edited(tmp_path, "events.jsonl", lambda lines: lines * 2) == (
        "line 2: recovery in step 1, epoch 1 after one in step 1, epoch 1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a run directory: cannot read config.yaml"),
        ("", "expected a mapping of settings, got None"),
        ("- 1", "expected a mapping of settings"),
        ("a: [", "not valid YAML: "),
    ],
)
def test_a_directory_without_settings_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)
