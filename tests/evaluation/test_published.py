"""What docs/evaluation.md says follows from the traces that are kept beside it.

After new runs: `recover bench all --out docs/evaluation`, then paste what these tests miss.
"""

import statistics
from pathlib import Path

import pytest

from recover.evaluation import report_section
from recover.evaluation.bench import Bench, write_csv
from recover.evaluation.contender import Trace
from recover.evaluation.experiments import EXPERIMENTS
from recover.evaluation.experiments.protocol import Row, column, number, those

DOCS = Path(__file__).parents[2] / "docs"
KEPT = DOCS / "evaluation"
NAMES = sorted(EXPERIMENTS)


def rows_of(name: str) -> list[Row]:
    """Return the rows of the full runs that are kept; every one of them is."""
    bench = Bench((EXPERIMENTS[name],), KEPT)
    plan = bench.plan(EXPERIMENTS[name])
    return EXPERIMENTS[name].rows(
        {run_name: Trace.load(bench.trace_file(run)) for run_name, run in plan.items()}
    )


@pytest.mark.parametrize("name", NAMES)
def test_values_and_section_follow_from_the_traces(name: str, tmp_path: Path) -> None:
    experiment, rows = EXPERIMENTS[name], rows_of(name)
    write_csv(rows, tmp_path / "again.csv")
    again = (tmp_path / "again.csv").read_text(encoding="utf-8")
    assert again == (KEPT / f"{name}.csv").read_text(encoding="utf-8")
    section = (KEPT / f"{name}.md").read_text(encoding="utf-8")
    assert report_section.table(experiment.table(rows)) in section
    assert all(sentence in section for sentence in experiment.words(rows))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_paper_s_table_beside_ours(name: str) -> None:
    experiment, rows = EXPERIMENTS[name], rows_of(name)
    page = (DOCS / "evaluation.md").read_text(encoding="utf-8")
    told = experiment.beside(rows) or experiment.table(rows)
    assert report_section.table(told) in page
    assert f"](evaluation/{name}.svg)" in page


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_kept(name: str) -> None:
    assert (KEPT / f"{name}.svg").stat().st_size > 5000
    assert (KEPT / f"{name}.png").stat().st_size > 5000


def test_no_trace_is_kept_that_nothing_uses() -> None:
    used = {
        Bench((experiment,), KEPT).trace_file(run)
        for experiment in EXPERIMENTS.values()
        for run in experiment.plan(experiment.full).values()
    }
    assert used == set((KEPT / "raw").iterdir())


def test_recover_stays_on_the_trajectory() -> None:
    experiment = EXPERIMENTS["trajectory"]
    lines = {str(line["run"]): line for line in experiment.table(rows_of("trajectory"))}
    far = {run: number(line, "mean |difference|") for run, line in lines.items()}
    assert number(lines["static"], "steps") >= 250
    assert number(lines["static"], "killed") == experiment.full.replicas // 2
    assert far["static"] <= 0.02
    assert far["static"] <= min(far[run] for run in far if run.startswith("reference,"))
    assert far["static"] < far["adaptive"]


def test_eight_failures_leave_more_throughput_than_the_paper_s() -> None:
    rows = rows_of("failures")
    (last,) = those(rows, setting=rows[0]["setting"], failure=8)
    assert number(last, "ratio") >= 2.23


def test_a_failure_costs_less_than_it_costs_the_peers() -> None:
    rows = rows_of("peers")
    costs = {
        system: column(those(rows, system=system), "cost of a failure s")
        for system in ("ReCoVer", "torchft", "torchrun with checkpoints")
    }
    assert min(map(len, costs.values())) >= 5
    medians = {system: statistics.median(seconds) for system, seconds in costs.items()}
    assert min(medians, key=lambda system: medians[system]) == "ReCoVer"
