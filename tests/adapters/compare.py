"""A framework's script twice: under failures, and alone with the framework's own accumulation."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tests.end_to_end.harness import Run, command, recover, write_faults

MICROBATCHES, REPLICAS, STEPS = 8, 4, 8
FAULTS = (
    {"step": 2, "replica": 0, "rank": 0, "location": "reduce"},
    {"step": 5, "replica": 3, "rank": 0, "location": "microbatch"},
)
SURVIVORS = (1, 2)


@dataclass(frozen=True, slots=True)
class Both:
    """What both runs kept."""

    run: Run
    out: Path
    alone: dict[str, Any]
    replicas: dict[int, dict[str, Any]]

    def parameters(self, name: str) -> dict[str, Tensor]:
        """Return the final parameters of ``alone`` or of ``replica-N``."""
        return cast(dict[str, Tensor], torch.load(self.out / f"{name}.pt", weights_only=True))

    def check(self) -> None:
        """B held, ids are exact, all survivors agree, and they have what the lone run has."""
        record = self.run.record
        assert [step.survivors for step in record.steps] == (
            [(0, 1, 2, 3)] * 2 + [(1, 2, 3)] * 3 + [SURVIVORS] * 3
        )
        for number, step in enumerate(record.steps):
            ids = sorted(i for ids in step.ids.values() for i in ids)
            assert ids == list(range(MICROBATCHES * number, MICROBATCHES * (number + 1)))
        assert len(set(self.run.checksums().values())) == 1
        lone = self.parameters("alone")
        first, second = (self.parameters(f"replica-{replica}") for replica in SURVIVORS)
        for name, tensor in lone.items():
            assert torch.equal(first[name], second[name]), name
            torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)


def run_both(subject: Path, directory: Path) -> Both:
    """Run a subject under the failures, then alone."""
    settings = {"out": str(directory), "microbatches": MICROBATCHES}
    faults = write_faults(directory / "faults.yaml", FAULTS)
    told = json.dumps(settings | {"alone": False})
    out = directory / "run"
    options = ["--replicas", REPLICAS, "--out", out, "--faults", faults]
    run = recover("run", *options, subject, told, out=out).finished()
    # Lightning looks for MPI by starting it, which would leave a segment of shared memory behind.
    words = ("env", "OMPI_MCA_btl=self", sys.executable, str(subject))
    alone = command(*words, json.dumps(settings | {"alone": True}))
    assert alone.status == 0, alone.replay
    kept = {
        name: json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("alone", *(f"replica-{replica}" for replica in SURVIVORS))
    }
    return Both(run, directory, kept.pop("alone"), dict(zip(SURVIVORS, kept.values(), strict=True)))


def imported_with_recover() -> set[str]:
    """Return the top-level modules that `import recover` loads."""
    code = "import recover, sys; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in said.stdout.split()}
