"""What users get wrong about replicas of several ranks: one clear sentence each, on every rank."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.harness import recover

pytestmark = pytest.mark.timeout(600)

SENTENCES = {
    "own_world_before_init": "call recover.init() instead of init_process_group",
    "equal_names": "two parts of the model have a parameter 'weight'",
    "sharded_over_replicas": "shards over job.process_group, which spans replicas",
}


def test_each_mistake_is_told_in_one_sentence(tmp_path: Path) -> None:
    script, out = Path(__file__).with_name("mistakes.py"), tmp_path / "run"
    size = ["--replicas", 2, "--ranks-per-replica", 2]
    run = recover("run", *size, "--out", out, script, tmp_path, out=out)
    files = sorted(tmp_path.glob("told-*.json"))
    assert len(files) == 4, run.replay
    for file in files:
        told = json.loads(file.read_text(encoding="utf-8"))
        assert told.keys() == SENTENCES.keys(), run.replay
        for name, sentence in SENTENCES.items():
            assert sentence in told[name], f"{file.name}: {told[name]!r}"
            assert "\n" not in told[name]
    assert run.status == 1, run.replay
    assert "replicas hold different models or settings" in run.stderr, run.replay
    assert "shard 1" in run.stderr, run.replay
    assert "Traceback" not in run.stdout + run.stderr, run.replay
