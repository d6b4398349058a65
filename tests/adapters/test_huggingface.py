"""Hugging Face's Trainer through two deaths, against its own accumulation in one process."""

import sys
from pathlib import Path

import pytest

from tests.adapters.compare import STEPS, SURVIVORS, Both, imported_with_recover, run_both
from tests.end_to_end.harness import command

pytestmark = pytest.mark.timeout(600)
SUBJECT = Path(__file__).with_name("hf_subject.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return run_both(SUBJECT, tmp_path_factory.mktemp("huggingface"))


def test_the_step_is_that_of_an_undisturbed_run(both: Both) -> None:
    both.check()


@pytest.mark.parametrize("key", ["loss", "grad_norm", "learning_rate", "eval_loss", "epoch"])
def test_logs_are_those_of_an_undisturbed_run(key: str, both: Both) -> None:
    wanted = [line[key] for line in both.alone["history"] if key in line]
    assert len(wanted) >= STEPS // 2
    for replica in SURVIVORS:
        found = [line[key] for line in both.replicas[replica]["history"] if key in line]
        assert found == pytest.approx(wanted, rel=1e-4)


def test_clipping_was_at_work(both: Both) -> None:
    norms = [line["grad_norm"] for line in both.alone["history"] if "grad_norm" in line]
    assert max(norms) > 0.05


def test_tokens_and_operations_are_those_of_all_replicas(both: Both) -> None:
    for replica in SURVIVORS:
        for key in ("tokens", "flops"):
            assert both.replicas[replica][key] == pytest.approx(both.alone[key])


def test_the_lowest_survivor_writes(both: Both) -> None:
    assert [both.replicas[replica]["first"] for replica in SURVIVORS] == [True, False]
    job = both.out / "job"
    folders = sorted(folder.name for folder in job.iterdir())
    assert folders == [f"checkpoint-{step}" for step in range(2, STEPS + 1, 2)]
    alone = sorted(f.name for f in (both.out / "alone" / "checkpoint-8").iterdir())
    assert sorted(f.name for f in (job / "checkpoint-8").iterdir()) == alone
    assert {both.replicas[r]["best"] for r in SURVIVORS} == {str(job / "checkpoint-8")}


def test_wrong_settings_are_told(both: Both) -> None:
    told = both.replicas[SURVIVORS[0]]["told"]
    assert "gradient_accumulation_steps must be 1, got 4" in told["accumulation"]
    assert "auto_find_batch_size" in told["batch size"]
    assert "push_to_hub" in told["hub"]


def test_it_must_be_launched(tmp_path: Path) -> None:
    settings = f'{{"out": "{tmp_path}", "microbatches": 8, "alone": false}}'
    run = command("env", "-u", "RECOVER_LAUNCH", sys.executable, str(SUBJECT), settings)
    assert run.status != 0
    assert "recover run" in run.stderr


def test_recover_does_without_it() -> None:
    assert not imported_with_recover() & {"transformers", "accelerate", "lightning", "torch"}
