"""Contenders as real processes: same losses, real deaths, and what their traces say.

Tests share runs: each run is made once, when a test first asks for it.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from recover.errors import RecoverError
from recover.evaluation import torchft_job
from recover.evaluation.contender import CONTENDERS, Commit, Kill, Task, Trace, run
from recover.evaluation.experiments.measures import failure_costs

STEPS, REPLICAS = 7, 2
UNDISTURBED = Task(replicas=REPLICAS, accumulation=3, steps=STEPS, preset="nano")
DISTURBED = Task(
    replicas=REPLICAS,
    accumulation=3,
    steps=STEPS,
    preset="nano",
    kills=(Kill(step=4, replica=1),),
    checkpoint_every=3,
    microbatch_ms=5.0,
    bandwidth_mbps=200.0,
)
DEADLINE_S = 100.0
Runner = Callable[[str], Trace]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Return what runs a contender on its task, once.

    The reference's device is real and the others' is emulated, which must not change a loss.
    """

    @cache
    def trace(contender: str) -> Trace:
        out = tmp_path_factory.mktemp(contender) / "out"
        heard: list[Commit] = []
        task = UNDISTURBED if contender == "reference" else DISTURBED
        left = run(contender, task, out, deadline_s=DEADLINE_S, on_commit=heard.append)
        assert left.settings["emulated"] == (contender != "reference")
        assert {commit.step for commit in heard} == set(range(STEPS))
        assert not processes_of(out), "a contender leaves no process behind"
        left.save(out / "trace.jsonl")
        assert Trace.load(out / "trace.jsonl") == left
        return left

    return trace


def processes_of(out: Path) -> list[int]:
    """Return the processes that know the directory by their environment or command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                known = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(out).encode() in known:
                found.append(int(entry.name))
    return found


def losses(trace: Trace) -> dict[int, float]:
    """Return the loss of each step, as it was committed last."""
    return {commit.step: commit.loss for commit in trace.commits}


@pytest.mark.parametrize("contender", ["recover", "checkpoint"])
def test_losses_are_those_of_the_reference_in_spite_of_a_death(
    traced: Runner, contender: str
) -> None:
    reference, subject = traced("reference"), traced(contender)
    assert losses(subject) == pytest.approx(losses(reference), abs=1e-5)
    assert {commit.microbatches for commit in subject.commits} == {UNDISTURBED.microbatches}


def test_the_reference_loses_nobody(traced: Runner) -> None:
    trace = traced("reference")
    assert [commit.step for commit in trace.commits] == list(range(STEPS))
    assert {commit.devices for commit in trace.commits} == {REPLICAS}
    assert not trace.times("failure")


def test_recover_goes_on_with_the_survivors(traced: Runner) -> None:
    trace = traced("recover")
    assert trace.settings["policy"] == "static"
    assert [commit.step for commit in trace.commits] == list(range(STEPS))
    assert [commit.devices for commit in trace.commits] == [2, 2, 2, 2, 1, 1, 1]
    (failure,), (recovered,) = trace.times("failure"), trace.times("recovered")
    assert trace.commits[3].time < failure < recovered
    assert recovered == pytest.approx(trace.commits[4].time, abs=0.05)
    assert len(failure_costs(trace)) == 1


def test_the_strawman_shrinks(traced: Runner) -> None:
    trace = traced("adaptive")
    assert [commit.microbatches for commit in trace.commits] == [6, 6, 6, 6, 3, 3, 3]
    before, after = losses(traced("reference")), losses(trace)
    assert after[4] == pytest.approx(before[4], abs=0.5)
    assert after[4] != pytest.approx(before[4], abs=1e-5)


def test_checkpoint_restart_passes_the_points_of_the_paper_in_order(traced: Runner) -> None:
    trace = traced("checkpoint")
    failure = trace.times("failure")[0]
    names = ("save_begin", "save_end", "failure", "exit", "load_begin", "load_end", "resumed")
    points = [trace.times(name)[0] for name in (*names, "rerun_end")]
    assert points == sorted(points)
    second_launch = min(time for time in trace.times("launch") if time > failure)
    assert points[2] < second_launch < points[4]
    assert [(c.step, c.rerun) for c in trace.commits if c.time > failure] == [
        (3, True),
        (4, False),
        (5, False),
        (6, False),
    ]
    assert {commit.devices for commit in trace.commits} == {REPLICAS}


def test_the_interrupted_step_of_checkpoint_restart_costs_more_than_the_restart(
    traced: Runner,
) -> None:
    trace = traced("checkpoint")
    (cost,) = failure_costs(trace)
    assert cost > trace.times("resumed")[0] - trace.times("failure")[0] > 0


def test_torchft_goes_on_with_fewer_microbatches(traced: Runner) -> None:
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("needs torchft")
    trace = traced("torchft")
    assert [commit.microbatches for commit in trace.commits] == [6, 6, 6, 6, 3, 3, 3]
    assert [commit.devices for commit in trace.commits] == [2, 2, 2, 2, 1, 1, 1]
    assert trace.times("discarded"), "the step that is hit is thrown away"
    same = {step: loss for step, loss in losses(trace).items() if step < 4}
    reference = losses(traced("reference"))
    assert same == pytest.approx({step: reference[step] for step in same}, abs=1e-5)


def test_torchft_that_is_missing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecoverError, match=r"pip install 'recover\[torchft\]'"):
        torchft_job.run("torchft", DISTURBED, tmp_path, deadline_s=1.0, on_commit=lambda _: None)


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    out = tmp_path / "late"
    with pytest.raises(RecoverError, match=r"no end after 0\.5 s"):
        run("reference", UNDISTURBED, out, deadline_s=0.5)
    assert not processes_of(out)


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="holds something already"):
        run("recover", UNDISTURBED, tmp_path, deadline_s=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_contender_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown contender 'horovod'; choose one of reference"):
        run("horovod", UNDISTURBED, tmp_path, deadline_s=1.0)
    assert set(CONTENDERS) >= {"reference", "recover", "adaptive", "checkpoint", "torchft"}
