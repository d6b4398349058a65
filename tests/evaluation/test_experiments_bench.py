"""The series: what is on file is not run again, what is written, and one real run."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from typer.testing import CliRunner

from recover.cli import app
from recover.errors import RecoverError
from recover.evaluation import bench, report_section
from recover.evaluation.contender import Commit, Task, Trace
from recover.evaluation.experiments import EXPERIMENTS
from recover.evaluation.experiments.protocol import Row, Run, Size, Traces
from tests.evaluation import synthetic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytest.importorskip("matplotlib", reason="figures need the extra `evaluation`")

PNG, LEAST_BYTES = b"\x89PNG", 5000


@dataclass
class Scripted:
    """A run that leaves a trace at once, or fails."""

    key: str
    made: list[str]
    optional: bool = False
    fails: bool = False
    estimate_s: float = 1.0
    steps: int = 3

    def perform(
        self, out: Path, *, deadline_s: float, on_commit: Callable[[Commit], None]
    ) -> Trace:
        out.mkdir(parents=True)
        self.made.append(self.key)
        if self.fails:
            raise RecoverError(f"{self.key} is not installed")
        trace = synthetic.trace("reference", Task(steps=self.steps))
        for commit in trace.commits:
            on_commit(commit)
        return trace


@dataclass
class Two:
    """An experiment of two runs."""

    runs: Mapping[str, Run]
    name: str = "two"
    title: str = "Two runs"
    paper: str = "Figure 0"
    explanation: str = "Nothing."
    full: Size = field(default_factory=lambda: Size(replicas=2))
    quick: Size = field(default_factory=lambda: Size(replicas=2))

    def plan(self, size: Size) -> Mapping[str, Run]:
        return self.runs

    def rows(self, traces: Traces) -> list[Row]:
        return [{"run": name, "steps": len(trace.commits)} for name, trace in traces.items()]

    def table(self, rows: Sequence[Row]) -> list[Row]:
        return list(rows)

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        return [{"paper": 1, "ours": 2}]

    def words(self, rows: Sequence[Row]) -> list[str]:
        return [f"{len(rows)} runs are there."]

    def draw(self, figure: "Figure", rows: Sequence[Row]) -> None:
        figure.subplots().plot([1, 2])


def silent() -> Console:
    return Console(quiet=True)


def test_runs_on_file_are_not_made_again(tmp_path: Path) -> None:
    made: list[str] = []
    failing = Scripted("b", made, fails=True)
    series = bench.Bench((Two({"a": Scripted("a", made), "b": failing}),), tmp_path)
    with pytest.raises(RecoverError, match=r"two: b: b is not installed; now in .*failed/b"):
        bench.run_bench(series, silent())
    assert (tmp_path / "failed" / "b").is_dir()
    assert made == ["a", "b"]
    assert not (tmp_path / "two.csv").exists()

    failing.fails = False
    bench.run_bench(series, silent())
    assert made == ["a", "b", "b"]
    with (tmp_path / "two.csv").open() as file:
        assert list(csv.DictReader(file)) == [
            {"run": "a", "steps": "3"},
            {"run": "b", "steps": "3"},
        ]
    assert not list((tmp_path / "work").iterdir())

    bench.run_bench(series, silent())
    assert made == ["a", "b", "b"]


def test_equal_runs_of_two_experiments_are_made_once(tmp_path: Path) -> None:
    made: list[str] = []
    both = (Two({"a": Scripted("a", made)}), Two({"x": Scripted("a", made)}, name="second"))
    bench.run_bench(bench.Bench(both, tmp_path), silent())
    assert made == ["a"]
    assert (tmp_path / "second.md").exists()


def test_what_may_be_missing_is_said_in_the_section(tmp_path: Path) -> None:
    made: list[str] = []
    runs = {"a": Scripted("a", made), "b": Scripted("b", made, optional=True, fails=True)}
    bench.run_bench(bench.Bench((Two(runs),), tmp_path, sizes={"seeds": 2}), silent())
    section = (tmp_path / "two.md").read_text()
    assert "## Two runs (Figure 0)" in section
    assert "- Left out: b is not installed" in section
    assert "recover bench two --seeds 2\n" in section
    assert "![Two runs](two.svg)" in section
    assert "Beside the paper (Figure 0):\n\n| paper | ours |" in section
    assert (tmp_path / "two.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_writes_its_table_and_draws_its_figure(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    series = bench.Bench((experiment,), tmp_path, quick=True)
    for run in series.plan(experiment).values():
        series.trace_file(run).parent.mkdir(exist_ok=True)
        synthetic.of(run).save(series.trace_file(run))
    bench.run_bench(series, silent())  # makes no run
    for suffix in (".png", ".svg", ".csv", ".md"):
        assert (tmp_path / f"{name}{suffix}").stat().st_size > (
            LEAST_BYTES if suffix in (".png", ".svg") else 100
        )
    drawn = (tmp_path / f"{name}.svg").read_text()
    emulated = report_section.emulation(
        {n: synthetic.of(run) for n, run in series.plan(experiment).items()}
    )
    assert emulated in drawn
    assert re.search("seconds?|device-hours|optimizer step", drawn), "axes have units"


def test_emulated_compute_is_said_wherever_it_is() -> None:
    real = synthetic.trace("recover", Task())
    emulated = synthetic.trace("recover", Task(microbatch_ms=5.0))
    assert report_section.emulation({"a": real}) == "real compute on shared cores"
    assert report_section.emulation({"a": real, "b": emulated}) == "emulated compute"
    assert "emulated ms per microbatch 0 / 5" in report_section.settings({"a": real, "b": emulated})


def test_a_table_shows_digits_that_matter_and_escapes_bars() -> None:
    cells = [report_section.shown(c) for c in (None, "a", 1234, 1234.5, 12.345, 1.234, 0.5, 4e-7)]
    assert cells == ["", "a", "1,234", "1,234", "12.3", "1.23", "0.500", "4.0e-07"]
    text = report_section.table([{"|x|": 1}, {"|x|": 2, "name": "b"}])
    assert text.splitlines() == [
        "| \\|x\\| | name |",
        "|---:|---|",
        "| 1 |  |",
        "| 2 | b |",
    ]


def test_a_missing_matplotlib_is_told_before_any_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecoverError, match=r"pip install 'recover\[evaluation\]'"):
        bench.run_bench(bench.Bench((Two({"a": Scripted("a", made)}),), tmp_path), silent())
    assert made == []


def test_an_experiment_that_failed_keeps_no_other_from_its_runs(tmp_path: Path) -> None:
    made: list[str] = []
    both = (
        Two({"b": Scripted("b", made, fails=True)}),
        Two({"a": Scripted("a", made)}, name="second"),
    )
    with pytest.raises(RecoverError, match="two: b: b is not installed"):
        bench.run_bench(bench.Bench(both, tmp_path), silent())
    assert made == ["b", "a"]
    assert (tmp_path / "second.md").exists()


def test_the_command_line_refuses_in_one_sentence() -> None:
    runner = CliRunner()
    for arguments, sentence in (
        (["bench", "nothing"], "unknown experiment 'nothing'"),
        (["bench", "failures", "--interval", "3"], "--interval must be an even number of steps"),
        (["bench", "peers", "--failures", "0"], "--failures must be at least 1 here, got 0"),
        (
            ["bench", "trajectory", "--steps", "10", "--interval", "40"],
            "--steps must be at least 165",
        ),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 2, result.output
        assert sentence in result.output


def test_the_experiments_explain_themselves() -> None:
    result = CliRunner().invoke(app, ["bench", "--list"])
    assert result.exit_code == 0
    assert all(name in result.output for name in EXPERIMENTS)


def test_real_ranks_agree_die_and_repair(tmp_path: Path) -> None:
    (scaling,) = bench.chosen("scaling")
    bench.run_bench(bench.Bench((scaling,), tmp_path, quick=True), silent())
    with (tmp_path / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["started"], row["what"]) for row in rows}
    times = ("agreement", "noticing", "shrink", "census", "recovery")
    assert found == {(n, what) for n in ("2", "4") for what in times}
    assert all(0 < float(row["ms"]) < 20_000 for row in rows)
