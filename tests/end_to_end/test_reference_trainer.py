"""`recover train`, as a user starts it: a real model on real text, undisturbed and under fire."""

from pathlib import Path

import pytest

from recover.records import read_run
from tests.end_to_end.harness import Run, recover, write_faults

pytestmark = pytest.mark.timeout(600)

STEPS, BATCH = 4, 8
FAULTS = (
    {"step": 1, "replica": 2, "rank": 0, "location": "reduce", "bucket": 1},  # the tally
    {"step": 2, "replica": 0, "rank": 0, "location": "backward"},
)


def train(directory: Path, *options: object) -> Run:
    directory.mkdir(parents=True)
    text = directory / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(2000)), encoding="utf-8")
    out = directory / "run"
    fixed = ("--steps", STEPS, "--microbatches", BATCH, "--text", text, "--out", out)
    return recover("train", *fixed, *options, out=out).finished()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("reference") / "job", "--replicas", 2, "--sequences", 1)


def test_a_disturbed_training_follows_the_undisturbed_one(reference: Run, tmp_path: Path) -> None:
    """Even one of another width: the microbatches of a step do not depend on the replicas."""
    file = write_faults(tmp_path / "faults.yaml", FAULTS)
    options = ("--replicas", 4, "--sequences", 1, "--parallel", "ddp", "--faults", file)
    run = train(tmp_path / "job", *options)
    assert len(set(run.checksums().values())) == 1
    assert set(run.checksums()) == {1, 3}
    for step, wanted in zip(run.record.steps, reference.record.steps, strict=True):
        assert step.loss == pytest.approx(wanted.loss, rel=1e-4), (step.step, run.replay)
        assert step.microbatches == BATCH
        assert step.tokens == BATCH * 128
    for died in (0, 2):
        assert f"replica {died} died" in run.stdout, run.replay
    assert "finished on 2 of 4 ranks" in run.stdout, run.replay


def test_the_run_directory_is_what_the_documentation_says(reference: Run) -> None:
    names = {path.name for path in reference.out.iterdir()}
    assert names == {"config.yaml", "events.jsonl", "steps.jsonl", "logs"}
    config = read_run(reference.out).config
    wanted = {"microbatches": BATCH, "replicas": 2, "steps": STEPS, "preset": "tiny", "seed": 0}
    assert {name: config[name] for name in wanted} == wanted
    said = set(reference.checksums().values())
    checksum = reference.record.steps[-1].checksum
    assert said == {f"recover: finished step {STEPS - 1}, parameters sha256 {checksum}"}
    assert reference.record.steps[-1].loss < reference.record.steps[0].loss


def test_the_example_for_ddp_scripts_goes_on_after_a_death(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "ddp.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    faults = ({"step": 5, "replica": 0, "rank": 0, "location": "reduce"},)
    file = write_faults(tmp_path / "faults.yaml", faults)
    out = tmp_path / "run"
    run = recover(
        "run", "--replicas", 3, "--faults", file, "--out", out, script, out=out
    ).finished()
    assert [step.microbatches for step in run.record.steps] == [16] * 40
    assert run.record.steps[-1].survivors == (1, 2)
    assert run.record.steps[-1].loss < run.record.steps[0].loss
