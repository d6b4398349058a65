"""Numbers of the experiments on traces whose times are known: hand-made, no processes."""

from dataclasses import replace

import pytest

from recover.evaluation.contender import Commit, Kill, Moment, Task, Trace
from recover.evaluation.experiments import EXPERIMENTS, measures, paper
from recover.evaluation.experiments.failures import PAPER, RARE, SINGLE, kills_every, settings
from recover.evaluation.experiments.protocol import (
    Experiment,
    Job,
    Row,
    Size,
    number,
    those,
    transferred_megabits,
)
from recover.evaluation.experiments.scaling import growth
from recover.evaluation.experiments.throughput import fit_model
from recover.evaluation.experiments.trajectory import FIRST_WINDOW, half_lost, window_of
from tests.evaluation import synthetic

FOUR = Task(
    replicas=4,
    accumulation=3,
    steps=9,
    kills=(Kill(5, 2), Kill(7, 0)),
    checkpoint_every=4,
)
"""B = 12: G = 3 with four replicas, 4 with three, 6 with two."""


def rows_of(name: str, size: Size | None = None) -> tuple[Experiment, list[Row]]:
    experiment = EXPERIMENTS[name]
    plan = dict(experiment.plan(size or experiment.full))
    return experiment, experiment.rows(synthetic.traces(plan))


# --- measures ------------------------------------------------------------------------------


def test_effective_throughput_counts_alive_devices_and_new_tokens_only() -> None:
    recover = measures.intervals(synthetic.trace("recover", FOUR))
    # step 5 recovers (0.5 s), step 6 takes 4 x 0.1 + 0.2, step 7 that until it is hit
    assert [interval.devices for interval in recover] == [3, 2]
    assert recover[0].seconds == pytest.approx(0.5 + 0.6 + 0.6)
    assert recover[0].tokens == 2 * 12 * synthetic.TOKENS
    assert recover[0].rate == pytest.approx(2400 / (1.7 * 3))

    restart = measures.intervals(synthetic.trace("checkpoint", FOUR))
    # exit 1, start 3, load 0.75; steps 4 and 5 at 0.5 s, of which 4 was committed before; 6, 7
    assert restart[0].devices == 4
    assert restart[0].seconds == pytest.approx(4.75 + 4 * 0.5)
    assert restart[0].tokens == 2 * 12 * synthetic.TOKENS


def test_an_interval_without_a_commit_is_an_error() -> None:
    trace = synthetic.trace("recover", FOUR)
    twice = Moment("failure", trace.times("failure")[0] + 0.01, 5)
    moments = sorted((*trace.moments, twice), key=lambda moment: moment.time)
    with pytest.raises(ValueError, match="nothing was committed between two failures"):
        measures.intervals(replace(trace, moments=tuple(moments)))


def test_a_step_before_the_first_failure_is_undisturbed_unless_it_saves() -> None:
    trace = synthetic.trace("checkpoint", FOUR)
    assert measures.undisturbed_step_s(trace) == pytest.approx(0.5)
    slow = [step.seconds for step in measures.paced(trace) if step.commit.step == 4]
    assert slow[0] == pytest.approx(0.5 + 0.25)


def test_a_failure_costs_what_it_took_to_get_further_less_a_step() -> None:
    assert measures.failure_costs(synthetic.trace("recover", FOUR)) == pytest.approx(
        [0.5, 0.5]  # that steps of G = 4 take 0.6 s instead of 0.5 s is no cost of the second
    )
    first, _ = measures.failure_costs(synthetic.trace("checkpoint", FOUR))
    assert first == pytest.approx(0.5 + 4.75 + 2 * 0.5 - 0.5)
    assert measures.failure_costs(synthetic.trace("torchft", FOUR))[0] == pytest.approx(5.5)


def test_device_time_ends_with_the_killed_device_or_goes_on_with_its_replacement() -> None:
    task = replace(FOUR, steps=6, kills=(Kill(5, 2),))
    recover = measures.accounts(synthetic.trace("recover", task))
    assert recover[-1].device_s == pytest.approx(4 * 5 * 0.5 + 3 * 0.5)
    restart = measures.accounts(synthetic.trace("checkpoint", task))
    assert restart[-1].device_s == pytest.approx(4 * (5 * 0.5 + 0.25 + 4.75 + 2 * 0.5))
    assert recover[-1].tokens == restart[-1].tokens == 5 * 12 * synthetic.TOKENS
    assert measures.tokens_at(recover, 4 * 0.5 + 0.1) == 12 * synthetic.TOKENS
    assert measures.tokens_at(recover, -1.0) == 0


def test_a_line_is_fitted_exactly() -> None:
    line = measures.fit([1, 2, 4], [3.0, 5.0, 9.0])
    assert (line.intercept, line.slope) == pytest.approx((1, 2))
    with pytest.raises(ValueError, match="two different x values"):
        measures.fit([2, 2], [1.0, 2.0])


# --- the paper -----------------------------------------------------------------------------


def test_the_emulated_device_has_the_paper_s_ratios() -> None:
    assert paper.microbatch_s() == pytest.approx(0.18, abs=0.001)
    device = paper.emulation(restart_s=40.0)
    step_s = 8 * device.microbatch_ms / 1000 + device.all_reduce_s
    assert 40.0 / step_s == pytest.approx(paper.RESTART_S / paper.STEP_S)
    assert device.all_reduce_s / device.microbatch_ms * 1000 == pytest.approx(26.5, abs=0.2)


# --- plans ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_plans_are_the_same_every_time_and_equal_runs_have_equal_keys(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for size in (experiment.full, experiment.quick):
        one, two = experiment.plan(size), experiment.plan(size)
        assert [run.key for run in one.values()] == [run.key for run in two.values()]
        assert len({run.key for run in one.values()}) == len(one)
        assert all(run.estimate_s > 0 for run in one.values())


def test_throughput_and_progress_need_no_runs_of_their_own() -> None:
    for borrower, owner in (("throughput", "trajectory"), ("progress", "failures")):
        for quick in (True, False):
            plans = [
                EXPERIMENTS[name].plan(EXPERIMENTS[name].quick if quick else EXPERIMENTS[name].full)
                for name in (borrower, owner)
            ]
            borrowed, owned = ({run.key for run in plan.values()} for plan in plans)
            assert borrowed <= owned


def test_any_other_setting_is_another_key() -> None:
    job = Job("recover", FOUR)
    others = [
        Job("adaptive", FOUR),
        Job("recover", replace(FOUR, seed=1)),
        Job("recover", replace(FOUR, kills=(Kill(5, 1), Kill(7, 0)))),
    ]
    assert job.key not in {other.key for other in others}


def test_half_of_the_replicas_die_once_in_every_window() -> None:
    size = EXPERIMENTS["trajectory"].full
    kills = half_lost(size)
    assert len(kills) == len({kill.replica for kill in kills}) == size.replicas // 2
    window = window_of(size)
    assert [(kill.step - FIRST_WINDOW) // window for kill in kills] == [0, 1, 2, 3]
    assert kills != half_lost(replace(size, seed=1))
    for replicas in (2, 16):
        kills = half_lost(replace(size, replicas=replicas))
        assert len(kills) == replicas // 2
        assert kills[-1].step < size.steps


def test_kills_come_halfway_between_checkpoints() -> None:
    assert [kill.step + 1 for kill in kills_every(8, 3, 4, seed=0)] == [12, 20, 28]


def test_the_settings_differ_in_what_they_say() -> None:
    size = EXPERIMENTS["failures"].full
    usual, rare, single = settings(size)
    assert [setting.name for setting in (usual, rare, single)] == [PAPER, RARE, SINGLE]
    assert usual.task.checkpoint_every == 16
    assert rare.task.checkpoint_every == 8
    assert len(rare.task.kills) == 1
    megabits = transferred_megabits(size.preset, 16)
    step_ms = 8 * usual.task.microbatch_ms + 1000 * megabits / usual.task.bandwidth_mbps
    assert single.task.microbatch_ms == pytest.approx(step_ms, rel=0.01)
    assert (single.task.accumulation, single.task.bandwidth_mbps) == (1, 0)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"intervals": (3,)}, "--interval must be an even number of steps, got 3"),
        ({"failures": 16}, "--failures must be under 16, got 16"),
        ({"replicas": 0}, "--replicas must be at least 1, got 0"),
    ],
)
def test_a_wrong_size_is_one_sentence(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(EXPERIMENTS["failures"].full, **changed)  # type: ignore[arg-type]


def test_a_trajectory_too_short_for_its_failures_is_refused() -> None:
    size = replace(EXPERIMENTS["trajectory"].full, steps=100, intervals=(40,))
    with pytest.raises(ValueError, match="--steps must be at least 165"):
        EXPERIMENTS["trajectory"].plan(size)


def test_the_paper_s_ratios_are_those_it_states() -> None:
    _, rows = rows_of("failures")
    beside = EXPERIMENTS["failures"].beside(rows)
    stated = [1.07, 1.15, 1.24, 1.33, 1.46, 1.58, 1.76, 2.23]
    assert [number(line, "paper: ratio") for line in beside] == pytest.approx(stated, abs=0.02)
    _, rows = rows_of("throughput")
    beside = EXPERIMENTS["throughput"].beside(rows)
    assert [number(line, "paper: change, %") for line in beside] == pytest.approx(
        [-2.5, -10.6, 8.4], abs=0.05
    )
    _, rows = rows_of("progress")
    assert number(EXPERIMENTS["progress"].beside(rows)[-1], "paper: more, %") == pytest.approx(
        74.9, abs=0.05
    )


def test_ours_stand_beside_the_paper_s() -> None:
    experiment, rows = rows_of("trajectory")
    at_250 = experiment.beside(rows)[-1]
    assert (at_250["step"], at_250["ours: difference"]) == (250, 0)
    assert at_250["ours: reference"] == "2.510"
    short = [row for row in rows if number(row, "step") < 10]
    assert experiment.beside(short)[-1]["ours: ReCoVer"] is None
    experiment, rows = rows_of("breakdown")
    beside = experiment.beside(rows)
    at_64 = {(str(line["system"]), str(line["whose"])): line for line in those(beside, N=64)}
    totals = {who: number(line, "total, s") for who, line in at_64.items()}
    assert totals == pytest.approx(
        {
            ("checkpoint-restart", "paper"): 636.8,
            ("checkpoint-restart", "ours"): 69,
            ("ReCoVer", "paper"): 386,
            ("ReCoVer", "ours"): 32.5,
        }
    )
    assert at_64["ReCoVer", "paper"]["checkpoint save, s"] is None


# --- experiments ---------------------------------------------------------------------------


def test_trajectory_sets_seed_noise_beside_the_differences() -> None:
    experiment, rows = rows_of("trajectory")
    lines = {str(line["run"]): line for line in experiment.table(rows)}
    assert number(lines["static"], "largest |difference|") == 0
    assert number(lines["adaptive"], "largest |difference|") == pytest.approx(0.05)
    assert number(lines["reference, seed 2"], "mean |difference|") == pytest.approx(0.06)
    assert (lines["static"]["killed"], lines["static"]["microbatches at the end"]) == (4, 32)
    assert lines["adaptive"]["microbatches at the end"] == 16
    assert "4 of 8 replicas were killed in 260 steps" in experiment.words(rows)[0]


def test_throughput_has_the_phases_of_the_paper_and_the_model_predicts_the_rest() -> None:
    experiment, rows = rows_of("throughput")
    phases = {str(line["phase"]): line for line in experiment.table(rows)}
    before = phases["before the first failure"]
    assert number(before, "change, %") == pytest.approx(0)
    after = phases["after the last"]
    assert number(after, "ReCoVer, tokens/s/replica") == pytest.approx(3200 / (1.0 * 4))
    assert phases["failure steps"]["steps"] == 4
    hit = [int(number(row, "step")) for row in rows if row["failure"]]
    assert hit == [kill.step for kill in half_lost(experiment.full)]
    model = fit_model(rows)
    assert model is not None
    assert (model.line.slope, model.line.intercept) == pytest.approx((0.1, 0.2))
    assert [p.accumulation for p in model.predictions] == [7, 8]
    assert all(p.predicted_s == pytest.approx(p.measured_s) for p in model.predictions)


def test_one_world_size_is_too_few_for_the_model() -> None:
    experiment, rows = rows_of("throughput")
    early = [row for row in rows if number(row, "step") < 20]
    assert fit_model(early) is None
    assert "Too few world sizes" in experiment.words(early)[0]


def test_failures_compare_interval_by_interval() -> None:
    experiment, rows = rows_of("failures")
    usual = those(rows, setting=PAPER)
    assert [row["ReCoVer replicas"] for row in usual] == list(range(15, 7, -1))
    assert {row["checkpoint replicas"] for row in usual} == {16}
    first = usual[0]
    assert number(first, "checkpoint s") == pytest.approx(4.75 + 0.25 + 24 * 1.0)
    assert number(first, "ReCoVer s") == pytest.approx(0.5 + 16 * 1.1)
    assert number(first, "restart s") == pytest.approx(4.75)
    ratio = (29.0 * 16) / (18.1 * 15)
    assert number(first, "ratio") == pytest.approx(ratio)
    assert "training: 4.8 s, 4.8 steps of 1.00 s" in experiment.words(rows)[0]
    assert "restart s" not in experiment.table(rows)[0]


def test_progress_counts_the_tokens_within_a_budget_of_device_time() -> None:
    experiment, rows = rows_of("progress")
    last = experiment.table(rows)[-1]
    ours = those(rows, contender="recover")[-1]
    assert last["ReCoVer, tokens"] == ours["tokens"]
    assert number(last, "device hours") == ours["device hours"]
    assert number(last, "more, %") > 0
    assert number(those(rows, contender="checkpoint")[-1], "tokens") == number(ours, "tokens")


def test_breakdown_has_the_paper_s_components() -> None:
    _, rows = rows_of("breakdown")
    (restart,) = those(rows, interval=8, system="checkpoint-restart")
    wanted = {"save": 0.25, "run": 4, "handling": 1, "restart": 3, "load": 0.75, "rerun": 4}
    assert {part: number(restart, part) for part in wanted} == pytest.approx(wanted)
    assert number(restart, "total") == pytest.approx(sum(wanted.values()))
    (ours,) = those(rows, interval=8, system="ReCoVer")
    assert [number(ours, part) for part in ("run", "recovery", "extra")] == pytest.approx(
        [4, 0.4, 0.1]
    )
    assert ours["save"] is None
    assert (restart["steps rerun"], ours["steps rerun"]) == (4, 0)


def test_a_checkpoint_that_was_not_complete_is_told() -> None:
    experiment = EXPERIMENTS["breakdown"]
    plan = dict(experiment.plan(replace(experiment.full, intervals=(8,))))
    traces = dict(synthetic.traces(plan))
    early = traces["8: checkpoint"]
    moments = [m for m in early.moments if not m.name.startswith("load")]
    moments = [replace(m, step=0) if m.name == "resumed" else m for m in moments]
    traces["8: checkpoint"] = replace(early, moments=tuple(moments))
    rows = experiment.rows(traces)
    assert (number(rows[0], "load"), number(rows[0], "restart")) == pytest.approx((0, 3.75))
    assert "12 steps were rerun" in experiment.words(rows)[-1]


def test_peers_are_compared_within_a_round_and_may_be_missing() -> None:
    experiment = EXPERIMENTS["peers"]
    traces = dict(synthetic.traces(dict(experiment.plan(experiment.full))))
    lines = {str(line["system"]): line for line in experiment.table(experiment.rows(traces))}
    assert lines["ReCoVer"]["failures"] == 6
    assert number(lines["torchrun with checkpoints"], "with saves / DDP") == pytest.approx(
        (0.6 + 0.25 / 10) / 0.6
    )
    assert number(lines["torchft"], "ReCoVer = 1") == pytest.approx(5.6 / 0.5)
    assert lines["DDP, no failures"]["cost of a failure, median s"] is None
    without = {name: trace for name, trace in traces.items() if "torchft" not in name}
    assert len(experiment.table(experiment.rows(without))) == 3


def test_scaling_says_which_growth_fits() -> None:
    experiment, rows = rows_of("scaling")
    said = {words.split(":")[0]: words for words in experiment.words(rows)}
    assert "log2 n ms, off by 0 %" in said["Agreement"]
    assert " n ms, off by 0 %" in said["Shrink"]
    assert [line["ranks"] for line in experiment.table(rows)] == [2, 4, 8, 16, 32, 64]
    best, *others = growth([2, 4, 8], [3.0, 4.0, 5.0])
    assert best.told == "2 + 1 log2 n"
    assert best.at(16) == pytest.approx(6)
    assert all(other.off > 0.01 for other in others)
    assert growth([2, 4, 8], [4.0, 16.0, 64.0])[0].told == "1 n^2.00"


def test_rerun_steps_are_never_counted_as_progress() -> None:
    commits = tuple(
        Commit(step, 1.0, 4, 400, 2, time, rerun)
        for step, time, rerun in ((0, 0.0, False), (1, 1.0, False), (1, 5.0, True), (2, 6.0, False))
    )
    trace = Trace("checkpoint", commits, (Moment("failure", 1.5, 2),), {})
    (interval,) = measures.intervals(trace)
    assert (interval.tokens, interval.seconds) == (400, 4.5)
    assert measures.accounts(trace)[-1].tokens == 800
