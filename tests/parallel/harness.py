"""Starts the ranks of one replica without the launcher: one function on M ranks, with a deadline.

Every rank is a process with stock torch.distributed over gloo and a store in a file, and writes
what the function returned to a file of its own.

``python -m tests.parallel.harness MODULE:FUNCTION FOLDER RANK RANKS ARGUMENTS`` is one rank.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def launch(
    function: str, ranks: int, arguments: dict[str, Any] | None = None, *, deadline_s: float
) -> list[Any]:
    """Run ``function`` ("module:name") on ``ranks`` ranks and return what each of them returned.

    Raises AssertionError, with all that the ranks printed, where one did not return in time.
    """
    with tempfile.TemporaryDirectory(prefix="rcvp-", dir="/tmp") as folder:
        out = Path(folder)
        processes = []
        for rank in range(ranks):
            command = [sys.executable, "-m", "tests.parallel.harness", function, folder]
            command += [str(rank), str(ranks), json.dumps(arguments or {})]
            with (out / f"{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        _end(processes, deadline_s)
        results = [out / f"{rank}.json" for rank in range(ranks)]
        if not all(path.exists() for path in results):
            logs = sorted(out.glob("*.log"))
            raise AssertionError("\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs))
        return [json.loads(path.read_text()) for path in results]


def _end(processes: "list[subprocess.Popen[bytes]]", deadline_s: float) -> None:
    """Wait until all have ended well, or one has not, or it is too late; leave none behind."""
    late_at = time.monotonic() + deadline_s
    waited: list[int | None] = [None]
    while None in waited and not any(waited) and time.monotonic() < late_at:
        time.sleep(0.05)
        waited = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def main() -> None:
    """Run one rank."""
    function, folder, rank, ranks, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks)
    )
    module, name = function.split(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(value))
    part.rename(part.with_suffix(".json"))
    dist.barrier()  # nobody takes its connections away from one that still works
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
