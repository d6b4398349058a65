"""The virtual world keeps the performer contract, at its worst, and names who breaks the rules."""

from collections.abc import Callable

import pytest

from recover.core.data import ExactLedger
from recover.core.effects import (
    Accumulate,
    Agree,
    Census,
    Detect,
    Leave,
    Reduce,
    Regroup,
    Restore,
    Shrink,
    Snapshot,
    Statement,
)
from recover.core.guard import Member, UnequalReplicas, roll_call
from recover.core.iteration import JobState, start
from recover.core.mesh import Mesh, Place
from recover.core.policies import RestoreMode
from recover.core.workload import Share
from recover.sim.__main__ import main
from recover.sim.adversary import Cue, Scripted, quiet
from recover.sim.gradients import Memory, Violation, counted, digits, named, total
from recover.sim.world import run_program

NOTHING = Statement(Share(0, False), 0)


def script(*cues: tuple[str, str], fails: tuple[int, ...] | None = None) -> Scripted:
    unlucky = None if fails is None else frozenset(map(Place, fails))
    return Scripted([Cue(0, None, move, point, unlucky) for move, point in cues])


def memories(mesh: Mesh, *, in_place: bool = True) -> dict[Place, Memory]:
    made = {}
    for rank in range(mesh.world_size):
        place = mesh.place(rank)
        made[place] = Memory(1, digits, in_place=in_place)
        made[place].load(digits(place.replica))
    return made


def remembering(kept: dict[Place, Memory]) -> Callable[[Place], Memory]:
    return lambda place: kept[place]


async def one_reduction(member: Member) -> tuple[bool, bool]:
    done = await Reduce(0, muted=False)
    return done, await Agree(done)


def test_a_reduction_sums_the_parts_that_are_not_muted() -> None:
    async def program(member: Member) -> bool:
        return await Reduce(0, muted=member.place.replica == 1)

    kept = memories(Mesh(3))
    assert run_program(Mesh(3), program, quiet(), memory=remembering(kept)) == {
        Place(r): True for r in range(3)
    }
    assert {memory.read()[0].gradient for memory in kept.values()} == {digits(0) + digits(2)}


def test_a_death_inside_a_reduction_shows_on_some_and_the_agreement_is_uniform() -> None:
    kept = memories(Mesh(4))
    adversary = script(("kill 3.0 during", "reduce 0"), fails=(1,))
    results = run_program(Mesh(4), one_reduction, adversary, memory=remembering(kept))
    assert results == {Place(0): (True, False), Place(1): (False, False), Place(2): (True, False)}
    assert kept[Place(0)].read()[0].gradient == sum(map(digits, range(4))), "its part counts"
    assert kept[Place(1)].read()[0].gradient is None, "undefined"


def test_a_death_before_a_reduction_fails_it_everywhere() -> None:
    results = run_program(Mesh(3), one_reduction, script(("kill 0.0 before", "reduce 0")))
    assert results == {Place(1): (False, False), Place(2): (False, False)}


def test_a_death_inside_an_agreement_does_not_take_its_vote_back() -> None:
    async def program(member: Member) -> tuple[bool, bool]:
        return await Agree(True), await Agree(True)

    results = run_program(Mesh(3), program, script(("kill 0.0 during", "consensus")))
    assert results == {Place(1): (True, False), Place(2): (True, False)}


def test_out_of_place_memory_keeps_the_local_gradient() -> None:
    async def program(member: Member) -> bool:
        await Reduce(0, muted=False)
        return await Reduce(0, muted=False)

    for in_place in (True, False):
        kept = memories(Mesh(2), in_place=in_place)
        run_program(Mesh(2), program, quiet(), memory=remembering(kept))
        once = digits(0) + digits(1)
        assert kept[Place(0)].read()[0].gradient == (2 * once if in_place else once)


def test_a_failure_revokes_the_group_for_data_but_not_for_votes() -> None:
    async def program(member: Member) -> tuple[bool, bool, bool]:
        return await Reduce(0, False), await Reduce(0, False), await Detect(True, 0)

    results = run_program(Mesh(2), program, script(("glitch during", "reduce 0"), fails=(0,)))
    assert results == {Place(0): (False, False, True), Place(1): (True, False, True)}


def test_the_new_groups_are_those_of_the_survivors() -> None:
    async def program(member: Member) -> tuple[int | None, set[int], bool]:
        await Agree(True)
        epoch = await Shrink()
        census = await Census(NOTHING)
        assert census is not None
        survivors = member.mesh.complete_replicas(census)
        await Agree(await Regroup(survivors))
        if member.place.replica not in survivors:
            await Leave("condemned")
        return epoch, {place.replica for place in census}, await Reduce(0, muted=False)

    mesh = Mesh(3, 2)
    kept = {mesh.place(rank): Memory(1, digits, in_place=True) for rank in range(6)}
    results = run_program(
        mesh, program, script(("kill 1.1 before", "consensus")), memory=remembering(kept)
    )
    assert set(results) == {Place(0, 0), Place(0, 1), Place(2, 0), Place(2, 1)}
    assert set(map(str, results.values())) == {"(1, {0, 1, 2}, True)"}
    assert kept[Place(0)].read()[0].replicas == (0, 2)


def test_a_rank_that_dies_inside_a_shrink_is_a_member() -> None:
    async def program(member: Member) -> tuple[int | None, bool]:
        return await Shrink(), await Census(NOTHING) is not None

    results = run_program(Mesh(3), program, script(("kill 1.0 during", "shrink")))
    assert results == {Place(0): (1, False), Place(2): (1, False)}


def test_an_excluded_rank_runs_on_and_nothing_of_it_works() -> None:
    seen: list[object] = []

    async def program(member: Member) -> None:
        outcomes: list[object] = [await Reduce(0, False), await Detect(True, 0), await Agree(True)]
        outcomes.append(await Shrink())
        if outcomes[-1] is None:
            outcomes += [await Census(NOTHING), await Regroup((0,))]
            seen.extend(outcomes)
            await Leave("excluded")

    adversary = script(("exclude 0.0 before", "reduce 0"))
    assert set(run_program(Mesh(3), program, adversary)) == {Place(1), Place(2)}
    assert seen == [False, False, False, None, None, False]


@pytest.mark.parametrize(("lowest", "dies"), [(0, None), (1, "0.0")])
def test_the_start_copies_the_parameters_of_the_lowest_survivor(
    lowest: int, dies: str | None
) -> None:
    state = JobState((0, 1, 2), ExactLedger())

    async def program(member: Member) -> JobState:
        return await start(member, state)

    kept = memories(Mesh(3))
    adversary = script((f"kill {dies} during", "reduce 0"), fails=(2,)) if dies else quiet()
    results = run_program(Mesh(3), program, adversary, memory=remembering(kept))
    assert {kept[place].read()[0].gradient for place in results} == {digits(lowest)}


# --- who breaks the rules ------------------------------------------------------------------


async def different_collectives(member: Member) -> bool:
    return await Detect(True, 0) if member.place.replica else await Reduce(0, False)


async def different_buckets(member: Member) -> bool:
    return await Reduce(member.place.replica, False)


async def one_forgets(member: Member) -> bool:
    return await Agree(True) if member.place.replica else True


async def no_regroup(member: Member) -> bool:
    await Shrink()
    return await Reduce(0, False)


async def one_raises(member: Member) -> bool:
    if member.place.replica:
        raise UnequalReplicas("just me")
    return True


async def a_bug(member: Member) -> bool:
    raise KeyError(member.place.replica)


async def too_early(member: Member) -> bool:
    await Snapshot(0)
    await Restore((0,), RestoreMode.NON_BLOCKING)
    return await Reduce(0, False)


async def for_ever(member: Member) -> bool:
    while await Agree(True):
        await Accumulate((), extra=False)
    return True


@pytest.mark.parametrize(
    ("program", "rule"),
    [
        (different_collectives, "mismatched collectives: 0.0 in reduce 0, 1.0 in detect 0"),
        (different_buckets, "mismatched collectives: 0.0 in reduce 0, 1.0 in reduce 1"),
        (one_forgets, "deadlock: 1.0 in consensus, 2.0 in consensus; finished: 0.0"),
        (no_regroup, "deadlock: 0.0 in reduce 0"),
        (one_raises, "an error on some ranks only"),
        (a_bug, "rank 0.0 fails: KeyError"),
        (too_early, "bucket 0 is reduced while its rewind is in flight"),
        (for_ever, "no progress"),
    ],
)
def test_a_broken_rule_is_named(program: Callable[[Member], object], rule: str) -> None:
    with pytest.raises(Violation, match=rule):
        run_program(Mesh(3), program, quiet())  # type: ignore[arg-type]


def test_an_error_on_every_rank_alike_leaves_the_world() -> None:
    async def program(member: Member) -> None:
        unequal = Member(member.place, member.mesh, fingerprint=member.place.replica // 2)
        await roll_call(unequal, Share(0, admitted=False))

    with pytest.raises(UnequalReplicas, match=r"\(shard 0\): \[0, 1\] / \[2\]"):
        run_program(Mesh(3), program, quiet())


# --- symbols and the command line ----------------------------------------------------------


def test_symbols_name_what_is_in_a_sum() -> None:
    assert named(digits(0) + 2 * digits(11)) == "0 11(x2)"
    assert named(None) == "undefined"
    assert named(0) == "nothing"
    assert total([digits(1), None]) is None
    sums = [sum(map(counted, ids)) for ids in ([1, 2], [1, 3], [0, 3], [1, 1], [1, 2, 3])]
    assert [amount >> 96 for amount in sums] == [2, 2, 2, 2, 3]
    assert len(set(sums)) == 5


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "replicas=3 microbatches=6 kills=1 @ 1:1"]) == 0
    assert "COMMIT step 0: 6 microbatches 0-5 / 6, epoch 1" in capsys.readouterr().out
    assert main(["--exhaustive", "2", "1", "4", "1"]) == 0
    assert "schedules" in capsys.readouterr().out
    assert main(["--swarm", "5"]) == 0
    assert "5 seeds" in capsys.readouterr().out
    assert main(["--replay", "replicas=none"]) == 2
    assert "none" in capsys.readouterr().err
