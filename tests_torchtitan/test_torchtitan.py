"""Real jobs of torchtitan under ``recover run``, with real SIGKILLs, against torchtitan alone.

The undisturbed run of comparison is torchtitan's own trainer on the ranks of one replica, which
takes all B microbatches of a step: data is exact, so losses and gradient norms are to be the same.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from recover.adapters.torchtitan import Group, Window
from recover.records import check_run, read_run

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent
DEADLINE_S = 280.0
RANKS = 2
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """A layout inside the replica, its microbatches and its deaths."""

    settings: dict[str, Any]
    replicas: int
    faults: tuple[str, ...]
    survivors: tuple[int, ...]


CASES = {
    "fsdp": Case(
        {"steps": 4, "microbatches": 6},
        3,
        ("{step: 1, replica: 1, rank: 1, location: reduce, bucket: 0}",),
        (0, 2),
    ),
    "fsdp-padded": Case(
        {"steps": 5, "microbatches": 6, "padded": True},
        3,
        (
            "{step: 1, replica: 1, rank: 1, location: reduce, bucket: 0}",
            "{step: 3, replica: 0, rank: 0, location: backward}",
        ),
        (2,),
    ),
    "tensor": Case(
        {"steps": 4, "microbatches": 4, "tp": 2},
        2,
        ("{step: 1, replica: 0, rank: 1, location: reduce, bucket: 0}",),
        (1,),
    ),
    "pipeline": Case(
        {"steps": 4, "microbatches": 4, "pp": 2},
        2,
        ("{step: 1, replica: 0, rank: 1, location: reduce, bucket: 0}",),
        (1,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_survivors_train_as_torchtitan_alone(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = recovering(case, tmp_path)
    record = read_run(tmp_path / "run")
    assert [*record.problems, *check_run(record)] == [], run
    assert len(record.steps) == case.settings["steps"]
    for step in record.steps:
        assert sum(step.contributions.values()) == case.settings["microbatches"]
    assert record.steps[-1].survivors == case.survivors
    shards = checksums(tmp_path / "run")
    assert {rank for rank, _ in shards} == {r * RANKS + s for r in case.survivors for s in (0, 1)}
    assert len({(rank % RANKS, text) for rank, text in shards}) == RANKS, "survivors differ"
    found = logged("".join(f.read_text() for f in (tmp_path / "run/logs").glob("rank-*.log")))
    assert found == pytest.approx(alone(case.settings, tmp_path), rel=TOLERANCE), run


def test_each_replica_reads_its_own_stream(tmp_path: Path) -> None:
    faults = ("{step: 1, replica: 0, rank: 1, location: consensus}",)
    case = Case({"steps": 3, "microbatches": 4, "data": "stream"}, 2, faults, (1,))
    run = recovering(case, tmp_path)
    record = read_run(tmp_path / "run")
    assert [*record.problems, *check_run(record)] == [], run
    assert record.config["data"] == "stream"
    assert [s.microbatches for s in record.steps] == [4, 4, 4]
    assert record.steps[-1].survivors == case.survivors


def test_a_window_keeps_what_may_be_asked_for_again() -> None:
    read = []

    def stream() -> Iterator[Group]:
        for number in count():
            read.append(number)
            yield [({}, torch.tensor(number))]

    window = Window(stream())
    assert int(window[2][0][1]) == 2
    window.committed([0, 1, 3])  # 2 was lost with its replica
    assert int(window[2][0][1]) == 2
    window.committed([2, 4, 5])
    assert read == [0, 1, 2, 3, 4, 5]
    assert int(window[6][0][1]) == 6


def recovering(case: Case, folder: Path) -> str:
    """Run a case to its end; return what it said."""
    faults = folder / "faults.yaml"
    faults.write_text("\n".join(["faults:", *(f"  - {fault}" for fault in case.faults), ""]))
    command = [sys.executable, "-c", "from recover.cli import app; app()", "run"]
    command += ["--replicas", str(case.replicas), "--ranks-per-replica", str(RANKS)]
    command += ["--faults", str(faults), "--out", str(folder / "run"), str(HERE / "subject.py")]
    command += [json.dumps(case.settings)]
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
    return ended.stdout[-8000:]


def alone(settings: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return what torchtitan alone logs, on as many ranks as a replica has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(RANKS):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (folder / f"alone-{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "stock.py"), json.dumps(settings)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        statuses = [process.wait(timeout=DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = "".join((folder / f"alone-{rank}.log").read_text() for rank in range(RANKS))
    assert statuses == [0] * RANKS, said[-8000:]
    return logged(said)


def logged(text: str) -> dict[str, float]:
    """Return loss and gradient norm of each step; pipeline ranks without a loss log -1."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("logged "):
            said = json.loads(line.removeprefix("logged "))
            if said["loss"] >= 0:
                found |= {f"{key} {said['step']}": said[key] for key in ("loss", "norm")}
    return found


def checksums(out: Path) -> set[tuple[int, str]]:
    """Return what each rank that reached the end says of its parameters."""
    return {
        (int(path.stem.removeprefix("rank-")), line)
        for path in out.glob("logs/rank-*.log")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("recover: finished step")
    }
