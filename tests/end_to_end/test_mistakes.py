"""What users get wrong: one clear sentence each, no wall of text, no hang."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.end_to_end.harness import Run, command, recover

pytestmark = pytest.mark.timeout(600)

SENTENCES = {
    "commit_before_the_loop": "commit was called before all microbatches of the step ran",
    "commit_inside_the_loop": "commit was called before all microbatches of the step ran",
    "no_backward": "was not given to step.backward",
    "no_last_backward": "was not given to step.backward",
    "backward_twice": "backward was called without a microbatch",
    "loop_begun_again": "microbatches would count twice",
    "no_commit": "step 0 was left without a commit",
    "steps_again": "a trainer runs its steps once",
    "stream_that_ends": "data stream ended at microbatch",
    "empty_data": "the data is empty",
    "no_steps": "until must be at least 1, got 0",
    "nothing_to_train": "no parameter that requires a gradient",
    "no_clipping": "clip_norm must be above 0, got 0.0",
    "no_microbatches": "microbatches (B) must be at least 1, got 0",
    "unknown_policy": "policy must be one of static, adaptive, got 'dynamic'",
    "unknown_restore": "restore must be one of auto, blocking, non_blocking, got 'later'",
    "another_group": "reduces over another process group",
    "gradients_in_buckets_of_ddp": "gradient_as_bucket_view",
    "overlap_in_place": "overlap=True needs in_place=False",
    "overlap_under_ddp": "overlap=True is for models without DistributedDataParallel",
    "unequal_models": "replicas hold different models or settings",
    "unequal_batches": "replicas hold different models or settings",
    "unequal_ends": "replicas hold different models or settings",
    "unequal_data": "replicas hold different models or settings",
}


@pytest.fixture(scope="session")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, str]]]:
    """Make all mistakes, on two replicas; return the run and what each replica was told."""
    directory = tmp_path_factory.mktemp("mistakes")
    script = Path(__file__).with_name("mistakes.py")
    out = directory / "run"
    run = recover("run", "--replicas", 2, "--out", out, script, directory, out=out)
    files = [directory / f"told-{replica}.json" for replica in range(2)]
    assert all(file.exists() for file in files), run.replay
    return run, [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("name", SENTENCES)
def test_each_mistake_is_told_in_one_sentence(
    name: str, mistakes: tuple[Run, list[dict[str, str]]]
) -> None:
    for replica, told in enumerate(mistakes[1]):
        assert SENTENCES[name] in told[name], f"replica {replica} was told {told[name]!r}"
        assert "\n" not in told[name]


def test_no_mistake_was_left_out(mistakes: tuple[Run, list[dict[str, str]]]) -> None:
    for told in mistakes[1]:
        assert set(told) == set(SENTENCES)


def test_a_mistake_on_all_replicas_ends_the_job(
    mistakes: tuple[Run, list[dict[str, str]]],
) -> None:
    run = mistakes[0]
    assert run.status == 1, run.replay
    assert "this was the last mistake" in run.stderr, run.replay
    assert "Traceback" not in run.stdout + run.stderr, run.replay


# --- scripts that fail ---------------------------------------------------------------------


def run_script(directory: Path, source: str, *, replicas: int) -> Run:
    script, out = directory / "script.py", directory / "run"
    script.write_text(source, encoding="utf-8")
    return recover("run", "--replicas", replicas, "--out", out, script, out=out)


def assert_one_error(run: Run, sentence: str) -> None:
    assert run.status == 1, run.replay
    assert sentence in run.stderr, run.replay
    assert "Traceback" not in run.stdout + run.stderr, run.replay
    assert len(run.stderr.splitlines()) <= 6, f"a wall of text{run.replay}"


def test_a_script_that_fails_everywhere_is_told_once(tmp_path: Path) -> None:
    run = run_script(tmp_path, "import nothing_of_this_name\n", replicas=3)
    assert_one_error(run, "No module named 'nothing_of_this_name' (script.py:1)")
    assert run.stderr.count("nothing_of_this_name") == 1, run.replay


FAILS_ON_ONE = """
import os
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    import nothing_of_this_name
import torch
import recover

job = recover.init(microbatches=3)
model = torch.nn.Linear(2, 1)
trainer = recover.Trainer(job, model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in trainer.steps([torch.ones(1, 2)], until=3):
    for microbatch in step:
        step.backward(model(microbatch).sum())
    step.commit()
"""


def test_a_script_that_fails_on_one_replica_goes_on_without_it(tmp_path: Path) -> None:
    run = run_script(tmp_path, FAILS_ON_ONE, replicas=3).finished()
    assert "nothing_of_this_name" in run.stdout, run.replay
    assert [s.survivors for s in run.record.steps] == [(1, 2)] * 3
    assert len(set(run.checksums().values())) == 1


STOPS_EARLY = """
import torch
import recover

job = recover.init(microbatches=3)
model = torch.nn.Linear(2, 1)
trainer = recover.Trainer(job, model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in trainer.steps([torch.ones(1, 2)], until=3):
    for microbatch in step:
        step.backward(model(microbatch).sum())
    step.commit()
    if step.number == 1:
        break
"""


def test_a_script_that_stops_early_has_not_finished(tmp_path: Path) -> None:
    run = run_script(tmp_path, STOPS_EARLY, replicas=2)
    assert_one_error(run, "the script ended at step 1 of 3")
    assert [s.step for s in run.record.steps] == [0, 1]


@pytest.mark.parametrize("script", ["mistakes.py", "subject.py"])
def test_a_script_without_the_launcher_says_how_to_start_it(script: str) -> None:
    words: Sequence[str] = (sys.executable, str(Path(__file__).with_name(script)), "{}")
    run = command(*words)
    assert run.status != 0, run.replay
    assert run.stdout == "", run.replay
    assert run.stderr.splitlines() == [run.stderr.strip()], run.replay
    assert "recover run --replicas" in run.stderr, run.replay
