"""What the exhaustive search leaves out makes no difference."""

import pytest

from recover.sim.adversary import sparse
from recover.sim.gradients import Violation
from recover.sim.job import Job, parse_replay, play
from recover.sim.liveness import live
from recover.sim.moves import Move, Point
from recover.sim.observer import Observer
from recover.sim.search import explore, job_of_seed, run_seed
from tests.sim.mutants import mutated, no_restore, stateless, trust_the_census


def test_cutting_off_known_states_leaves_only_repetition_out() -> None:
    job = Job.parse("replicas=2 microbatches=3 kills=1 glitches=1")
    cut, whole = explore(job), explore(job, merge=False)
    assert cut.schedules < whole.schedules == whole.finished


@pytest.mark.parametrize(
    "text",
    ["replicas=3 microbatches=6 buckets=1 kills=1", "replicas=2 microbatches=3 kills=1 steps=2"],
)
def test_a_broken_protocol_is_found_with_and_without_cutting_off(text: str) -> None:
    job = Job.parse(text)
    for merge in (True, False):
        with pytest.raises(Violation, match="holds"):
            explore(job, merge=merge, program=stateless(no_restore)(job))


def test_undefined_after_a_shrink_finds_what_real_sums_find() -> None:
    for memory in ("in_place", "spoiled"):
        job = Job.parse(f"replicas=3 microbatches=6 kills=1 memory={memory}")
        with pytest.raises(Violation, match="holds"):
            explore(job, program=stateless(no_restore)(job))


def test_moves_that_nobody_can_tell_apart_find_nothing_more() -> None:
    """With them or not, the same broken protocol is caught, and the good one passes."""
    for every_point in (0, 1):
        job = Job.parse(f"replicas=3 microbatches=6 glitches=2 every_point={every_point}")
        explore(job)
        with pytest.raises(Violation, match="mismatched"):
            explore(job, program=mutated(trust_the_census)(job))


class Strikes(Observer):
    """What the adversary did in a run, as (move, point)."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, str]] = []

    def struck(self, point: Point, move: Move) -> None:
        self.moves.append((str(move), point.name))


def test_the_search_contains_two_columns_at_once_and_replicas_that_die_rank_by_rank() -> None:
    """What replicas of several ranks add, in a job of which larger ones are extensions."""
    runs = list[Strikes]()

    def observers() -> tuple[Observer, ...]:
        runs.append(Strikes())
        return (runs[-1],)

    shape = "replicas=3 shards=2 microbatches=6 buckets=1 finish=0 memory=spoiled kills=2"
    explore(Job.parse(shape), every_subset_up_to=1, observers=observers)
    made = {tuple(run.moves) for run in runs}
    for first, second in (("before", "before"), ("during", "during"), ("before", "during")):
        columns = ((f"kill 0.0 {first}", "reduce 0"), (f"kill 1.1 {second}", "reduce 0"))
        assert columns in made, "before the next collective of the whole job"
    for point in ("detect 0", "reduce 0", "shrink", "census", "census-verdict", "regroup"):
        pair = (("kill 0.0 before", "reduce 0"), ("kill 0.1 before", point))
        assert pair in made or pair[::-1] in made, f"its peer in the {point}"
    assert any(
        len(moves) == 4 and {move.split()[1] for move, _ in moves} == {"0.0", "0.1", "1.0", "1.1"}
        for moves in made
    ), "two replicas die as units"


def test_a_failure_message_replays() -> None:
    job = Job.parse("replicas=3 microbatches=6 kills=1")
    program = stateless(no_restore)(job)
    with pytest.raises(Violation) as caught:
        explore(job, program=program)
    rule, command = str(caught.value).splitlines()
    again, picks = parse_replay(command.partition("--replay '")[2].partition("'")[0])
    assert again == job
    subsets = int(command.rpartition(" ")[2])
    adversary = sparse(picks, job.budget(), every_subset_up_to=subsets)
    with pytest.raises(Violation) as replayed:
        play(job, adversary, program=program)
    assert str(replayed.value) == rule


def test_a_seed_is_a_job() -> None:
    seed = next(s for s in range(1000) if run_seed(s)[1] and job_of_seed(s)[0].memory == "in_place")
    job, picks = run_seed(seed)
    assert picks
    assert job == Job.parse(str(job))


def swarm_a_broken_protocol() -> None:
    for seed in range(1000):
        run_seed(seed, program=stateless(no_restore))


def test_a_failing_seed_names_itself_and_its_picks() -> None:
    with pytest.raises(Violation) as caught:
        swarm_a_broken_protocol()
    rule, first, second = str(caught.value).splitlines()
    job = job_of_seed(int(first.rpartition(" ")[2]))[0]
    again, picks = parse_replay(second.partition("--replay '")[2].partition("'")[0])
    assert again == job
    with pytest.raises(Violation) as replayed:
        play(job, sparse(picks, job.budget()), program=stateless(no_restore)(job))
    assert str(replayed.value) == rule


def _sample(first: int, second: int) -> int:
    kept = first
    while kept:
        second = kept
        kept -= second
    return kept


def test_liveness_knows_what_is_read_again() -> None:
    code = _sample.__code__
    assert live(code, 0) >= {"first"}
    assert "second" not in live(code, 0)
    assert live(code, 1) == {"first", "second", "kept"}, "an unknown offset: everything is live"
