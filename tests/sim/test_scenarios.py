"""Golden conversations: each file's trace is what the protocol does today.

After an intended change: ``python -m recover.sim --rewrite tests/sim/scenarios/*.txt``, then review
the difference like code. The numbers of the paper are asserted here as literals as well, so that a
rewrite cannot hide that they have changed.
"""

from pathlib import Path

import pytest

from recover.sim.scenario import Scenario, parse

FILES = sorted(Path(__file__).parent.joinpath("scenarios").glob("*.txt"))


def read(stem: str) -> Scenario:
    return parse(Path(__file__).parent.joinpath("scenarios", f"{stem}.txt").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_conversation_is_as_reviewed(path: Path) -> None:
    scenario = parse(path.read_text())
    assert scenario.run() == scenario.trace, (
        f"{path.stem} runs differently; see: python -m recover.sim --scenario {path}"
    )


def commits(stem: str) -> list[str]:
    return [line for line in read(stem).run().splitlines() if "COMMIT" in line]


def test_figure_5_has_the_numbers_of_the_paper() -> None:
    first, boundary, advanced, promoted = commits("figure5")
    assert "contributions 0-31:8; major 0-31" in first
    assert "epoch 1, G=8, contributions 0-7:9 8-30:8; major 0-7; boundary_minor 8-30" in boundary
    assert (
        "G=9, contributions 0-27:9 28:4 29-30:0; major 0-27; minor 28; major_spare 29; "
        "minor_spare 30"
    ) in advanced
    assert "contributions 0-27:9 30:4 29:0; major 0-27; major_spare 29; minor 30" in promoted
    assert all(": 256 microbatches" in line and "/ 256" in line for line in commits("figure5"))


def test_appendix_e_keeps_the_failing_step_on_the_failure_free_microbatches() -> None:
    failing, following = commits("appendix_e")
    assert "256 microbatches 0-255 / 256, epoch 1" in failing
    assert "256 microbatches 256-511 / 256, epoch 1, G=9" in following


def test_two_columns_get_one_plan() -> None:
    plans = [line for line in read("two_columns").run().splitlines() if ": plan:" in line]
    assert plans == [
        "  0,2.*: plan: epoch 1, lost replicas 1,3, promote none, extra 0,2:2, policy boundary"
    ]


def test_a_replica_that_dies_rank_by_rank_is_one_loss() -> None:
    lines = read("unit").run().splitlines()
    assert [line for line in lines if ": plan:" in line] == [
        "  0,2.*: plan: epoch 2, lost replicas 1, promote none, extra 0,2:1, policy boundary"
    ]
    assert sum("shrink: epoch" in line for line in lines) == 2, "for three deaths"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("job: replicas=3 replicants=1\n---\n", "unknown key 'replicants'"),
        ("job: policy=wild\n---\n", "policy must be one of"),
        ("step 0: kill everybody\n---\n", "not a cue: 'step 0: kill everybody'"),
        ("job: replicas=0\n---\n", "replicas must be at least 1, got 0"),
    ],
)
def test_a_broken_file_is_one_clear_error(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)
