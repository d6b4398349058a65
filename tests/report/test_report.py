"""What a report says is what the records say; whatever the run, and whatever its texts hold."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recover.cli import app
from recover.records import RunRecord, check_run
from recover.report.data import RunView, load, thin
from recover.report.page import render
from tests.record_samples import CONFIG, EVENT, HIT, RUN, STEP
from tests.report.runs import MadeUp, Page, points_of, text_of, written

HOSTILE = """</script><script>alert("1")</script> & '<b>'"""


def page_of(*runs: RunRecord) -> Page:
    views = [RunView(f"run{n}", run, tuple(check_run(run))) for n, run in enumerate(runs)]
    return Page(render(views))


def many_deaths() -> RunRecord:
    """Promotions, boundaries, two failures in one step, two replicas lost at once."""
    return MadeUp(8, 17, {3: [(1,)], 6: [(7,), (2,)], 9: [(0, 4)]}).run(14)


# --- numbers ---------------------------------------------------------------------------------


def test_the_made_up_run_is_sound_and_has_everything() -> None:
    run = many_deaths()
    assert check_run(run) == []
    roles = {role for step in run.steps for role in step.roles.values()}
    assert roles == {"major", "minor", "major_spare", "minor_spare", "boundary_minor"}
    assert any(event.promoted for event in run.events)


def test_a_card_says_what_the_records_say() -> None:
    after = replace(HIT, step=2, loss=1.25, failed=(), boundary=False, accumulation=3)
    after = replace(after, ids={0: (12, 13, 14), 2: (15, 16, 17)}, recovery_s=0.0, wall_s=0.5)
    page = page_of(RunRecord(CONFIG | {"steps": 10}, (STEP, HIT, after), (EVENT,)))
    assert page.facts() == {
        "Steps": "3 of 10",
        "Tokens": "1,800",
        "Replicas": "3 → 2",
        "Failures survived": "1 1 replica lost",
        "Time lost to failures": "500 ms 50.0 % of 1.00 s",
        "Throughput": "1,800 tokens/s",
        "Last loss": "1.2500",
    }
    verdict = text_of(page.all("verdict ok")[0])
    assert verdict.startswith("The invariant holds: each of 3 steps committed B = 6 microbatches")


def test_a_run_that_tells_no_tokens_is_counted_in_microbatches() -> None:
    silent = [replace(step, tokens=0) for step in (STEP, HIT)]
    facts = page_of(RunRecord(CONFIG | {"steps": 2}, tuple(silent), (EVENT,))).facts()
    assert facts["Microbatches"] == "12"
    assert facts["Throughput"].endswith(" microbatches/s")
    assert "Tokens" not in facts


def test_losses_and_throughput_of_every_step_are_in_the_tables() -> None:
    run = many_deaths()
    page = page_of(run)
    expected = [[str(s.step), f"{s.loss:.4f}"] for s in run.steps]
    assert page.table("step", "run0") == expected
    tables = [
        [[text_of(cell) for cell in row] for row in table.findall("tbody/tr")]
        for table in page.root.iter("table")
        if [text_of(cell) for cell in table.iter("th")] == ["step", "run0"]
    ]
    whole, each = ({int(step): float(n.replace(",", "")) for step, n in t} for t in tables[1:])
    for step in run.steps:
        assert whole[step.step] == pytest.approx(step.tokens / step.wall_s, rel=1e-2)
        per_replica = step.tokens / step.wall_s / len(step.survivors)
        assert each[step.step] == pytest.approx(per_replica, rel=1e-2)


def test_means_are_taken_while_the_number_of_replicas_stays() -> None:
    rows = page_of(MadeUp(2, 4, {3: [(0,)]}).run(5)).table(
        "", "replicas", "tokens/s", "per replica"
    )
    lost_s = 0.02 + 0.01 + 0.005 + 0.25 + 0.04
    assert rows == [
        ["steps 0–2", "2", "800", "400"],
        ["steps 3–4", "1", f"{800 / (1 + lost_s):.0f}", f"{800 / (1 + lost_s):.0f}"],
    ]


def test_a_curve_is_drawn_through_the_losses() -> None:
    run = many_deaths()
    page = page_of(run)
    (curve,) = page.all("curve", page.chart("Loss per microbatch"))
    points = points_of(curve)
    assert len(points) == len(run.steps)
    (x0, y0), (x1, y1) = points[0], points[-1]
    for (x, y), step in zip(points, run.steps, strict=True):
        at = step.step / (len(run.steps) - 1)
        assert x == pytest.approx(x0 + (x1 - x0) * at, abs=0.02)
        part = (step.loss - run.steps[0].loss) / (run.steps[-1].loss - run.steps[0].loss)
        assert y == pytest.approx(y0 + (y1 - y0) * part, abs=0.2)


def test_the_rows_of_roles_repeat_the_records() -> None:
    run = many_deaths()
    page = page_of(run)
    lanes = page.all("lane")
    assert len(lanes) == 8
    for replica, lane in enumerate(lanes):
        drawn: list[str] = []
        for cell in lane.findall("i"):
            steps = float(re.findall(r"width:([\d.]+)%", cell.get("style", ""))[0])
            role = cell.get("class", "").split()[0]
            drawn += [role] * round(steps / 100 * len(run.steps))
        assert drawn == [step.roles.get(replica, "dead") for step in run.steps]
        promoted = sum(replica in event.promoted for event in run.events)
        assert len(lane.findall("u")) == promoted
        lost = sum(replica in step.failed for step in run.steps)
        assert len(lane.findall("b")) == lost


def test_the_times_of_recoveries_add_up() -> None:
    run = many_deaths()
    (view,) = (RunView("run", run, ()),)
    assert [f.event.step for f in view.failures] == [3, 6, 6, 9]
    for failure, event in zip(view.failures, run.events, strict=True):
        assert sum(failure.phases.values()) == pytest.approx(failure.lasted_s)
        assert failure.phases["repair"] == event.repair_s
    assert sum(f.lasted_s for f in view.failures) == pytest.approx(view.lost_s)
    page = page_of(run)
    head = ("step", "lost", "noticed in", "promoted", "extra run")
    phases = ("detect", "repair", "restore", "extra", "rest", "total")
    rows = page.table(*head, *phases)
    assert [row[:2] for row in rows] == [
        ["3", "1"],
        ["6", "7"],
        ["6", "2"],
        ["9", "0, 4"],
        ["all", ""],
    ]
    times = ["20.0 ms", "10.0 ms", "5.00 ms", "250 ms", "40.0 ms", "325 ms"]
    assert all(row[-6:] == times for row in rows[:4])
    assert rows[4][-6:] == ["80.0 ms", "40.0 ms", "20.0 ms", "1.00 s", "160 ms", "1.30 s"]
    assert [int(row[4]) for row in rows[:4]] == [sum(e.extra.values()) for e in run.events]


def test_a_bar_has_a_part_for_each_phase_that_took_time() -> None:
    run = replace(RUN, events=(replace(EVENT, restore_s=0.0),))
    (bar,) = page_of(run).all("bar")
    assert [part.get("class") for part in bar] == ["detect", "repair", "extra", "rest"]
    widths = [float(part.get("style", "").strip("width:%")) for part in bar]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    assert widths[1] == pytest.approx(20, abs=0.1)


# --- several runs ----------------------------------------------------------------------------


def test_runs_are_compared_with_the_first_one() -> None:
    calm, hit = MadeUp(4, 8).run(6), MadeUp(4, 8, {2: [(3,)]}).run(4)
    moved = replace(hit.steps[3], loss=hit.steps[3].loss - 0.02)
    page = page_of(calm, replace(hit, steps=(*hit.steps[:3], moved)))
    rows = page.table("run", "steps", "mean |Δ|", "largest |Δ|", "in step")
    assert rows == [["run1", "4", "0.005", "0.02", "3"]]
    assert len(page.all("curve", page.chart("Loss per microbatch"))) == 2
    assert len(page.all("failure", page.chart("Loss per microbatch"))) == 1
    assert len(points_of(page.all("curve", page.chart("Loss difference"))[0])) == 4


def test_runs_without_a_step_in_common_are_not_compared() -> None:
    late = MadeUp(2, 4).run(4)
    late = replace(late, steps=tuple(replace(step, step=step.step + 9) for step in late.steps))
    text = text_of(page_of(MadeUp(2, 4).run(3), late).root)
    assert "Difference" not in text


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, RUN) for name in ("a/x", "b/x", "b/y")]
    assert [view.label for view in load(paths[1:])] == ["x", "y"]
    assert [view.label for view in load(paths)] == [str(path) for path in paths]


# --- runs of all kinds -----------------------------------------------------------------------


def test_a_run_without_failures() -> None:
    page = page_of(MadeUp(2, 4).run(5))
    assert page.facts()["Failures survived"] == "0"
    assert page.facts()["Time lost to failures"] == "0 s"
    assert page.facts()["Replicas"] == "2 → 2"
    assert "No failure is on record." in text_of(page.root)
    assert not page.all("failure")
    assert not page.all("bar")
    assert not page.all("dead")


def test_a_run_that_has_only_begun() -> None:
    page = page_of(RunRecord(CONFIG, (), ()))
    assert text_of(page.all("verdict open")[0]) == "No step is on record yet."
    assert not list(page.root.iter("svg"))
    assert "microbatches6" in text_of(page.all("settings")[0])


def test_a_run_of_one_step_is_a_dot() -> None:
    (curve, *_) = page_of(MadeUp(1, 1).run(1)).all("curve")
    assert re.fullmatch(r"M50\.00 [\d.]+h0", curve.get("d", ""))


def test_a_line_that_was_cut_off_is_named(tmp_path: Path) -> None:
    directory = written(tmp_path / "torn", MadeUp(2, 4).run(5))
    file = directory / "steps.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    page = Page(render(load([directory])))
    assert page.facts()["Steps"] == "4 of 5"
    assert "line 5: cut off in the middle" in text_of(page.all("note")[0])


def test_a_recovery_whose_step_is_not_on_file_yet_is_shown() -> None:
    run = many_deaths()
    page = page_of(replace(run, steps=run.steps[:9]))
    assert page.facts()["Failures survived"] == "4 5 replicas lost"
    assert len(page.all("failure", page.chart("Loss per microbatch"))) == 4
    assert len(page.root.findall(".//b[@data-tip]")) == 5


def test_a_loss_that_is_no_number_is_a_gap() -> None:
    run = MadeUp(2, 4).run(9)
    steps = [replace(s, loss=math.nan) if s.step in (3, 4) else s for s in run.steps]
    page = page_of(replace(run, steps=tuple(steps)))
    (curve,) = page.all("curve", page.chart("Loss per microbatch"))
    assert curve.get("d", "").count("M") == 2
    assert len(points_of(curve)) == 7
    assert "run0: no number in 2 steps." in text_of(page.root)
    assert page.table("step", "run0")[3] == ["3", "not a number"]


def test_ten_thousand_steps_are_thinned_but_no_failure_is_hidden() -> None:
    deaths = {17: [(0,)], 18: [(1,)], 4000: [(2,)], 9999: [(3,)]}
    run = MadeUp(8, 64, deaths).run(10_000)
    spike = replace(run.steps[4321], loss=99.0)
    run = replace(run, steps=(*run.steps[:4321], spike, *run.steps[4322:]))
    text = render([RunView("long", run, ())])
    assert len(text) < 400_000
    page = Page(text)
    chart = page.chart("Loss per microbatch")
    points = points_of(page.all("curve", chart)[0])
    assert len(points) <= 810
    assert min(points, key=lambda point: point[1])[0] == pytest.approx(43.215, abs=0.02)
    drawn = {x for x, _ in points}
    marks = [float(line.get("x1", "")) for line in page.all("failure", chart)]
    assert marks == pytest.approx([(step + 0.5) / 100 for step in deaths], abs=0.006)
    assert set(marks) <= {round(x, 2) for x in drawn}
    assert len(page.root.findall(".//b[@data-tip]")) == 4
    told = " ".join(hit.get("data-tip", "") for hit in page.all("hit", chart))
    assert all(f"replica {n} lost in step {step}," in told for n, step in enumerate(deaths))
    rows = {row[0] for row in page.table("step", "long")}
    assert {str(step) for step in deaths} <= rows
    assert "lowest and the highest" in text_of(page.root)


def test_thinning_keeps_what_matters() -> None:
    points = [(x, float((x * 7919) % 1000)) for x in range(5000)]
    points[77] = (77, math.nan)
    kept = thin(points, {1234, 2345}, 100)
    assert len(kept) <= 105
    assert {points[0], points[-1], points[77], points[1234], points[2345]} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    finite = [y for _, y in points if math.isfinite(y)]
    shown = [y for _, y in kept if math.isfinite(y)]
    assert (min(shown), max(shown)) == (min(finite), max(finite))
    assert thin(points[:100], set(), 100) == points[:100]


def test_sixty_four_replicas_have_a_row_each() -> None:
    deaths = {3 * n: [(n,)] for n in range(32)}
    page = page_of(MadeUp(64, 512, deaths).run(120))
    assert page.facts()["Replicas"] == "64 → 32"
    assert len(page.all("lane")) == 64
    assert len(page.all("bar")) == 32


# --- the verdict -----------------------------------------------------------------------------


def test_a_broken_invariant_is_said_first() -> None:
    run = replace(
        RUN, steps=(*RUN.steps[:2], replace(RUN.steps[2], ids={0: (12, 13, 14), 2: (0, 1, 2)}))
    )
    page = page_of(run)
    assert text_of(page.all("verdict broken")[0]).startswith("The invariant is broken: 3 problems")
    (problems,) = page.all("problems")
    assert "step 2: microbatch 0 was committed in 0" in [text_of(item) for item in problems]


def test_a_thousand_problems_are_counted() -> None:
    run = MadeUp(2, 4).run(1000, microbatches=5)
    (problems,) = page_of(run).all("problems")
    assert len(problems) == 101
    assert text_of(problems[-1]) == "and 900 more"


def test_the_policy_that_lets_b_shrink_is_not_praised() -> None:
    run = MadeUp(2, 4).run(4, policy="adaptive")
    smaller = replace(run.steps[3], microbatches=2)
    page = page_of(
        replace(
            run,
            steps=(
                *run.steps[:3],
                replace(
                    smaller, contributions={0: 1, 1: 1}, ids={0: (90,), 1: (91,)}, accumulation=1
                ),
            ),
        )
    )
    assert not page.all("verdict ok")
    assert "lets B shrink: 4 to 2 microbatches" in text_of(page.all("verdict open")[0])


# --- texts -----------------------------------------------------------------------------------


def test_texts_of_files_stay_texts(tmp_path: Path) -> None:
    config = {HOSTILE: HOSTILE, "{{body}}": "{{title}}", "nested": {"a": [1, HOSTILE]}}
    run = replace(MadeUp(2, 4, {1: [(0,)]}).run(3, **config), problems=(HOSTILE,))
    event = replace(run.events[0], location=HOSTILE)
    text = render([RunView(HOSTILE, replace(run, events=(event,)), (HOSTILE,)) for _ in range(2)])
    assert text.count("<script") == 1
    assert "<b>'" not in text
    page = Page(text)
    names = Counter(tag.tag for tag in page.root.iter())
    assert "script" not in names
    assert HOSTILE in [text_of(heading) for heading in page.root.iter("h2")]
    pairs = {text_of(pair[0]): text_of(pair[1]) for pair in page.all("settings")[0]}
    assert pairs[HOSTILE] == HOSTILE
    assert pairs["{{body}}"] == "{{title}}"


def test_the_machine_is_shown_where_the_run_says_it() -> None:
    run = MadeUp(2, 4).run(3, machine={"cpu": "16 cores"})
    page = page_of(run)
    assert "Machine" in [text_of(heading) for heading in page.root.iter("h3")]
    assert text_of(page.all("settings")[1]) == "cpu16 cores"
    assert "Machine" not in text_of(page_of(MadeUp(2, 4).run(3)).root)


def test_the_file_stands_alone() -> None:
    text = render([RunView("run", many_deaths(), ())])
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<img|<iframe| src=", text)
    assert "default-src 'none'" in text


# --- the command -----------------------------------------------------------------------------


def test_one_run_has_its_report_beside_its_records(tmp_path: Path) -> None:
    directory = written(tmp_path / "one", RUN)
    result = CliRunner().invoke(app, ["report", str(directory)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(directory / "report.html")
    assert (
        Page((directory / "report.html").read_text(encoding="utf-8")).facts()["Tokens"] == "1,800"
    )


def test_several_runs_have_theirs_where_you_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(written(tmp_path / name, RUN)) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", *runs]).exit_code == 0
    assert (tmp_path / "report.html").exists()
    assert CliRunner().invoke(app, ["report", *runs, "--out", "c.html"]).exit_code == 0
    assert (tmp_path / "c.html").read_text() == (tmp_path / "report.html").read_text()


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["report", *arguments])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    return line


def test_what_cannot_be_read_or_written_is_one_sentence(tmp_path: Path) -> None:
    good, bad = written(tmp_path / "good", RUN), written(tmp_path / "bad", RUN)
    assert f"{tmp_path} is not a run directory: cannot read config.yaml" in refusal(str(tmp_path))
    out = tmp_path / "missing" / "report.html"
    assert f"cannot write to {out}: No such file" in refusal(str(good), "--out", str(out))
    lines = (bad / "steps.jsonl").read_text().splitlines()
    (bad / "steps.jsonl").write_text("\n".join([lines[0], "{}", lines[2]]) + "\n")
    assert "steps.jsonl, line 2: the key 'step' is missing" in refusal(str(good), str(bad))
    assert not (tmp_path / "report.html").exists()
