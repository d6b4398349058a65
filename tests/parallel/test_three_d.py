"""The three axes of a replica against one process: gradients, losses, and passes of any length.

Starting ranks is what these tests cost, so there is one start for two ranks and one for four.
"""

from typing import Any

import pytest
import torch

from recover.parallel.pipeline import Pipeline
from recover.parallel.shape import ReplicaShape
from recover.train.model import ModelConfig
from recover.train.three_d import build_replica, split_layers
from tests.parallel.harness import launch
from tests.parallel.replica_ranks import DENSE, PASSES, SPARSE

pytestmark = pytest.mark.timeout(240)

TWO: dict[str, dict[str, Any]] = {
    "interleaved": {"shape": {"pp": 2}, "schedule": "interleaved"},
    "bfloat16": {"shape": {"pp": 2}, "schedule": "1f1b", "dtype": "bfloat16", "untied": True},
    "experts": {"shape": {"ep": 2}, "sparse": True},
    "sequence parallel": {"shape": {"tp": 2}, "sequence_parallel": True},
}
FOUR: dict[str, dict[str, Any]] = {
    "gpipe and tensor": {"shape": {"pp": 2, "tp": 2}},
    "1f1b and sequence, recomputed": {
        "shape": {"pp": 2, "tp": 2},
        "schedule": "1f1b",
        "sequence_parallel": True,
        "recompute": True,
    },
    "1f1b and experts": {"shape": {"pp": 2, "ep": 2}, "schedule": "1f1b", "sparse": True},
}


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return launch("tests.parallel.replica_ranks:compare_two", 2, {"cases": TWO}, deadline_s=100)


@pytest.fixture(scope="module")
def four() -> list[Any]:
    return launch("tests.parallel.replica_ranks:compare", 4, {"cases": FOUR}, deadline_s=100)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one_process(two: list[Any], name: str) -> None:
    check([result["cases"][name] for result in two], TWO[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one_process(four: list[Any], name: str) -> None:
    check([result[name] for result in four], FOUR[name])


def check(results: list[dict[str, Any]], case: dict[str, Any]) -> None:
    exact = case.get("dtype") is None
    stages = case["shape"].get("pp", 1)
    for rank, result in enumerate(results):
        assert result["gradient"] < (5e-6 if exact else 5e-2)
        assert result["loss"] < (5e-6 if exact else 5e-3)
        last = rank >= len(results) - len(results) // stages
        assert result["counts"] == (list(PASSES) if last else [0] * len(PASSES))
        assert result["elements"] == pytest.approx(result["of"])  # each counted once by `copies`


def test_a_frozen_stage_passes_nothing_back_and_breaks_nothing(two: list[Any]) -> None:
    assert two[0]["frozen"] == {"losses": 0, "gradients": 0}
    assert two[1]["frozen"]["losses"] == 7
    assert two[1]["frozen"]["gradients"] > 0


def test_earlier_stages_take_the_layers_left_over() -> None:
    assert split_layers(7, 3) == [range(3), range(3, 5), range(5, 7)]
    with pytest.raises(ValueError, match="layers=2 cannot be shared out over 4 pipeline stages"):
        split_layers(2, 4)


@pytest.mark.parametrize(
    ("config", "shape", "options", "message"),
    [
        (DENSE, {"tp": 4}, {}, "kv_heads=2 is not a multiple of tp=4"),
        (DENSE, {"ep": 2}, {}, "ep=2 needs a model with experts, got experts=0"),
        (SPARSE, {"ep": 3}, {}, "sequences=4 is not a multiple of ep=3"),
        (SPARSE, {"ep": 3}, {"sequences": 6}, "experts=4 is not a multiple of ep=3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    config: ModelConfig, shape: dict[str, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_replica(config, ReplicaShape(**shape), **{"sequences": 4, "seed": 0} | options)


def test_an_unknown_schedule_and_too_few_stages_are_refused() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    with pytest.raises(ValueError, match="choose one of gpipe, 1f1b, interleaved"):
        Pipeline([], loss, "zero bubble")
    with pytest.raises(ValueError, match="0 stages on a rank do not fit the schedule 'gpipe'"):
        Pipeline([], loss)
