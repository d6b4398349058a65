"""Lightning through two deaths, against its own accumulation in one process."""

from pathlib import Path

import pytest

from tests.adapters.compare import STEPS, SURVIVORS, Both, run_both

pytestmark = pytest.mark.timeout(600)
SUBJECT = Path(__file__).with_name("lightning_subject.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return run_both(SUBJECT, tmp_path_factory.mktemp("lightning"))


def test_the_step_is_that_of_an_undisturbed_run(both: Both) -> None:
    both.check()


@pytest.mark.parametrize("key", ["rates", "norms", "checks"])
def test_hooks_see_what_they_see_in_an_undisturbed_run(key: str, both: Both) -> None:
    wanted = both.alone[key]
    assert len(wanted) == (2 if key == "checks" else STEPS)
    for replica in SURVIVORS:
        assert both.replicas[replica][key] == pytest.approx(wanted, rel=1e-4)


def test_clipping_was_at_work(both: Both) -> None:
    assert max(both.alone["norms"]) > 0.2


def test_the_lowest_survivor_writes(both: Both) -> None:
    assert [both.replicas[replica]["first"] for replica in SURVIVORS] == [True, False]
    wanted = sorted(file.name for file in (both.out / "alone").iterdir())
    assert sorted(file.name for file in (both.out / "job").iterdir()) == wanted


def test_accumulation_of_its_own_is_refused(both: Both) -> None:
    told = both.replicas[SURVIVORS[0]]["told"]["accumulation"]
    assert "accumulate_grad_batches must be 1, got 4" in told
