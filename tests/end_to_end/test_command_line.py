"""The command line: its surface is frozen, and bad input is one sentence with status 2."""

from pathlib import Path

import pytest
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner

from recover.cli import app
from tests.end_to_end.harness import recover

SURFACE = {
    "run": "SCRIPT ARGS --replicas --ranks-per-replica --faults --out",
    "train": "--replicas --microbatches --steps --preset --data --seed --policy --restore --dtype"
    " --parallel --ranks-per-replica --tp --pp --ep --schedule --sequence-parallel --recompute"
    " --compile --in-place --overlap --sequences --learning-rate --warmup --clip-norm --bucket-mb"
    " --microbatch-ms --bandwidth-mbps --text --faults --out",
    "demo": "--out",
    "bench": "NAME --list --quick --out --replicas --accumulation --steps --failures --interval"
    " --seeds --seed --preset --microbatch-ms --bandwidth-mbps --restart-s",
    "report": "RUNS --out",
    "doctor": "",
    "faults generate": "--replicas --ranks-per-replica --seed --count --first-step --last-step"
    " --weights",
    "faults check": "FILE --replicas --ranks-per-replica",
}


def commands(group: object, prefix: str = "") -> dict[str, TyperCommand]:
    if isinstance(group, TyperCommand):
        return {prefix.strip(): group}
    assert isinstance(group, TyperGroup)
    found: dict[str, TyperCommand] = {}
    for name, command in group.commands.items():
        found |= commands(command, f"{prefix} {name}")
    return found


def surface(command: TyperCommand) -> str:
    arguments = [p for p in command.params if isinstance(p, TyperArgument)]
    options = [p for p in command.params if isinstance(p, TyperOption)]
    assert len(arguments) + len(options) == len(command.params)
    names = [str(p.name).upper() for p in arguments]
    return " ".join([*names, *(p.opts[0] for p in options)])


def test_the_surface_is_frozen() -> None:
    """Somebody's script uses each of these: add to them, and change this test; take none away."""
    found = commands(typer.main.get_command(app))
    assert {name: surface(command) for name, command in found.items()} == SURFACE


def test_every_command_has_help() -> None:
    for name in SURFACE:
        result = CliRunner().invoke(app, [*name.split(), "--help"])
        assert result.exit_code == 0, name
        assert "Usage" in result.output


# --- bad input -----------------------------------------------------------------------------

WRONG_SETTINGS = {
    "--replicas 0": "replicas must be at least 1, got 0",
    "--replicas -3": "replicas must be at least 1, got -3",
    "--microbatches 0": "microbatches must be at least 1, got 0",
    "--steps 0": "steps must be at least 1, got 0",
    "--sequences 0": "sequences must be at least 1, got 0",
    "--seed -1": "seed must be at least 0, got -1",
    "--learning-rate 0": "learning_rate must be above 0, got 0",
    "--clip-norm nan": "clip_norm must be above 0, got nan",
    "--bucket-mb 0": "bucket_mb must be above 0, got 0",
    "--policy adaptive --replicas 4 --microbatches 3": "microbatches must be at least replicas",
    "--text missing.txt": "text must be an existing file, got",
    "--text empty.txt": "text must be a file that is not empty, got",
    "--text .": "text must be an existing file, got",
    "--faults missing.yaml": "missing.yaml: cannot read the fault schedule",
}
WRONG_FAULTS = {
    "faults: [{step: 0, replica: 0, location: nowhere}]": "unknown location 'nowhere'",
    "faults: [{step: 0, replica: 4, location: reduce}]": "replica must be 0..3, got 4",
    "faults: [{step: 0, replica: 0, location: reduce, when: now}]": "unknown key 'when'",
    "faults: [{step: 0, replica: 0, rank: 1, location: reduce}]": "rank must be 0, got 1",
    "faults: [{step: -1, replica: 0, location: reduce}]": "step must be 0 or more, got -1",
    "faults: [{step: 0, replica: 0, location: data, bucket: 1}]": "bucket goes with location",
    "faults: [{step: 0": "not valid YAML: line 1",
    "": "the fault schedule is empty",
    "faults: 3": "faults must be a list",
}


def refused(arguments: list[str]) -> str:
    """Return the one sentence that a command line is refused with, with status 2."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("recover: ")
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()


@pytest.mark.parametrize("options", WRONG_SETTINGS)
def test_a_wrong_setting_of_train_is_one_sentence(options: str) -> None:
    assert WRONG_SETTINGS[options] in refused(["train", *options.split()])
    assert not Path("runs").exists(), "a refused command leaves nothing behind"


@pytest.mark.parametrize("text", WRONG_FAULTS)
@pytest.mark.parametrize("verb", ["train", "run", "faults check"])
def test_a_wrong_faults_file_is_told_before_anything_starts(verb: str, text: str) -> None:
    Path("faults.yaml").write_text(text, encoding="utf-8")
    Path("script.py").touch()
    where = {
        "train": ["train", "--faults", "faults.yaml"],
        "run": ["run", "--replicas", "4", "--faults", "faults.yaml", "script.py"],
        "faults check": ["faults", "check", "faults.yaml"],
    }
    assert WRONG_FAULTS[text] in refused(where[verb])
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--replicas 0 script.py", "replicas must be at least 1, got 0"),
        ("--ranks-per-replica 0 script.py", "ranks_per_replica must be at least 1, got 0"),
        ("missing.py", "there is no script 'missing.py'"),
        ("--out empty.txt script.py", "is a file"),
        ("--out used script.py", "already holds a run"),
    ],
)
def test_a_wrong_setting_of_run_is_one_sentence(options: str, sentence: str) -> None:
    Path("script.py").touch()
    Path("used").mkdir()
    Path("used/steps.jsonl").write_text("{}\n", encoding="utf-8")
    assert sentence in refused(["run", *options.split()])


def test_a_demo_does_not_overwrite_what_is_not_a_demo() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    assert "thesis.tex" in refused(["demo", "--out", "mine"])
    assert Path("mine/thesis.tex").exists()


def test_options_after_the_script_belong_to_the_script() -> None:
    result = CliRunner().invoke(app, ["run", "missing.py", "--replicas", "0"])
    assert "there is no script 'missing.py'" in result.stderr


@pytest.mark.timeout(300)
def test_the_sentence_is_all_there_is_in_a_real_process() -> None:
    run = recover("train", "--microbatches", 0)
    assert (run.status, run.stdout) == (2, ""), run.replay
    assert run.stderr == "recover: microbatches must be at least 1, got 0\n", run.replay
