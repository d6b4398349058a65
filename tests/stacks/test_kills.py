"""Every stack inside the replica, every location, every shard: as one process would have trained.

Seven runs of 4 replicas of 2 ranks, one for each stack; each loses three replicas by the death of
one of their ranks: one alone, and one that dies while the others recover from a third one. Every
location is hit in both shards: in shard 0, which hosts the store of its replica, and in shard 1.
B = 12 divides by 4, 3, 2 and 1, so there is never a spare: every step must commit the ids of a run
without failures, and so each run is compared with one process that trains on those.

The first steps, before anybody has died, are the test of the stack without failures. Most of it is
marked slow: `make test-slow`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recover.core.schedule import Location
from tests.stacks.harness import (
    Kill,
    assert_as_alone,
    assert_same_ids,
    assert_unit_deaths,
    run_subject,
)
from tests.stacks.subject import Settings

pytestmark = pytest.mark.timeout(600)

REPLICAS = 4
STACKS = ("fsdp2", "fsdp1", "pp", "hybrid", "tp", "fsdp1-orig", "fsdp2-bf16")
ANYWHERE = ("data", "microbatch", "forward", "backward", "reduce", "consensus", "optimizer")
DURING = ("repair", "restore", "extra")
ALONE_IN, TOGETHER_IN = 6, 12
QUICK = ("fsdp2", "pp")


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    settings: Settings
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        return ":".join([self.settings.stack, *map(str, self.kills)])


def cases() -> Iterator[Case]:
    """Yield one run for each stack; each place is used as a cause in one shard, alone in the other.

    Replica 0's shard 0, which is world rank 0, dies alone and during a recovery, too.
    """
    for turn, stack in enumerate(STACKS):
        alone = (turn + 3) % len(ANYWHERE)
        cause = Kill(TOGETHER_IN, (turn + 1) % REPLICAS, turn % 2, ANYWHERE[turn])
        kills = (
            Kill(ALONE_IN, (turn + 2) % REPLICAS, 1 - alone % 2, ANYWHERE[alone]),
            cause,
            Kill(cause.noticed_in, turn % REPLICAS, turn // 3 % 2, DURING[turn % 3]),
        )
        clip_norm = 2.0 if turn % 2 == 0 else None
        settings = Settings(
            stack, clip_norm=clip_norm, in_place=turn % 3 == 1, overlap=turn % 3 == 0
        )
        yield Case(settings, kills)


CASES = tuple(cases())


def test_every_location_is_hit_in_every_shard() -> None:
    hit = {(kill.location, kill.shard) for case in CASES for kill in case.kills}
    assert hit == {(str(location), shard) for location in Location for shard in (0, 1)}
    assert any(kill.victim == 0 for case in CASES for kill in case.kills)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[] if c.settings.stack in QUICK else pytest.mark.slow, id=str(c))
        for c in CASES
    ],
)
def test_survivors_train_on_as_one_process_would(case: Case, tmp_path: Path) -> None:
    run = run_subject(tmp_path / "job", case.settings, replicas=REPLICAS, kills=case.kills)
    assert_unit_deaths(run, case.kills)
    assert_same_ids(run, case.settings)
    narrow = case.settings.stack == "fsdp2-bf16"
    assert_as_alone(
        run,
        case.settings,
        tolerance=0.1 if narrow else 1e-4,
        loss_tolerance=1e-2 if narrow else 1e-4,
    )


COLUMNS = (("fsdp2", "reduce", 0), pytest.param("pp", "consensus", None, marks=pytest.mark.slow))
"""Stack, location and bucket of two deaths in different columns at once."""


@pytest.mark.parametrize(("stack", "location", "bucket"), COLUMNS)
def test_two_columns_lose_a_rank_at_once(
    stack: str, location: str, bucket: int | None, tmp_path: Path
) -> None:
    """Each column sees another death; both must come to the same survivors and the same verdict."""
    kills = (Kill(3, 0, 0, location, bucket), Kill(3, 1, 1, location, bucket))
    settings = Settings(stack, steps=6)
    run = run_subject(tmp_path / "job", settings, replicas=4, kills=kills)
    assert_unit_deaths(run, kills)
    assert_same_ids(run, settings)
    assert_as_alone(run, settings, tolerance=1e-4, loss_tolerance=1e-4)
    assert run.record.steps[-1].survivors == (2, 3)
