"""Failure-free step time and memory: a stack with ReCoVer, and with its own synchronisation.

    python -m benchmarks.stack_time [--quick] [--stacks fsdp2 hybrid 3d] [--preset tiny|small]

Sets of R x 2 processes live side by side and take turns in short blocks of steps, in rotating
order; those that wait sleep in a read. All train the reference model on the same microbatches with
the same optimizer, clipping and threads; the losses of the last step must agree. A ratio is that of
two blocks of one round; printed is its median over the rounds. Inside a replica all do the same:

    fsdp2    a reduce-scatter per microbatch. Stock: a mesh (replicate, shard), the all-reduce of
             the shards held back until the last microbatch (`set_requires_all_reduce`)
    hybrid   FSDP1's HYBRID_SHARD. Stock: `no_sync` for all but the last microbatch, which saves the
             reduce-scatters too and keeps whole gradients meanwhile; as a second contender, none
    3d       two pipeline stages, 1F1B. Stock: DistributedDataParallel around each stage, which
             pipelining synchronises with the last microbatch

ReCoVer also reduces the loss and writes its records; the stock loops do neither.

Memory is what tensors take on a rank, counted one by one: parameters, optimizer state, gradients
(stock: ``param.grad``, and DDP's buckets where gradients do not live in them); and the highest
resident size of the process less that right after its imports.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    ROOT,
    describe_machine,
    finished_run,
    median,
    percentile,
    verdict,
)

RANKS = 2
"""Of a replica."""
CASES: dict[str, dict[str, Any]] = {
    "tiny": {"microbatches": 16, "sequences": 4, "bucket_mb": 25.0, "block": 3},
    "small": {"microbatches": 8, "sequences": 2, "bucket_mb": 25.0, "block": 1},
}
CONTENDERS = {
    "fsdp2": ("recover", "stock"),
    "hybrid": ("recover", "stock", "stock, every microbatch"),
    "3d": ("recover", "stock"),
}
DEADLINE_S = 400.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--stacks", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--preset", choices=list(CASES), default="tiny")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    rounds = options.rounds or (2 if options.quick else 15)
    for stack in options.stacks:
        case = CASES[options.preset] | {"stack": stack, "preset": options.preset}
        measure(case, replicas=options.replicas, rounds=rounds)


def measure(case: dict[str, Any], *, replicas: int, rounds: int) -> None:
    """Run one stack with all of its contenders and print the comparison."""
    names = CONTENDERS[case["stack"]]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = case | {
            "port": listener.getsockname()[1],
            "replicas": replicas,
            "steps": (rounds + 1) * case["block"],
        }
        turns = Turns(listener, names, replicas * RANKS, case["block"], rounds)
        ours = finished_run(
            "stack_time_ranks",
            told | {"contender": "recover"},
            replicas=replicas,
            ranks_per_replica=RANKS,
            deadline_s=DEADLINE_S,
        )
        with stock_sets(names[1:], told, replicas * RANKS), turns.running(), ours:
            pass
    report(case, replicas, turns)


class Turns:
    """Lets one set of processes train at a time, and takes the time of every block."""

    def __init__(
        self, listener: socket.socket, names: Sequence[str], ranks: int, block: int, rounds: int
    ) -> None:
        self.times: dict[str, list[float]] = {name: [] for name in names}
        """Seconds per step of every block, the first one left out."""
        self.told: dict[str, list[Any]] = {name: [] for name in names}
        """What each rank said at its end."""
        self._listener, self._ranks, self._block, self._rounds = listener, ranks, block, rounds
        self._lines: dict[str, list[Any]] = {name: [] for name in names}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Give turns from a thread of their own, to the end of all sets."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        yield
        thread.join(timeout=60)
        if thread.is_alive():
            raise SystemExit("benchmark: not all processes came to their end")

    def _run(self) -> None:
        names = list(self.times)
        for _ in range(len(names) * self._ranks):
            stream = self._listener.accept()[0].makefile("rw", encoding="utf-8")
            self._lines[stream.readline().strip()].append(stream)
        for number in range(self._rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                started_at = time.monotonic()
                self._ask(name, "go")
                if number:
                    self.times[name].append((time.monotonic() - started_at) / self._block)
        for name in names:
            self.told[name] = [json.loads(line) for line in self._ask(name, "end")]

    def _ask(self, name: str, word: str) -> list[str]:
        """Say a word to all ranks of a set and wait for their answers."""
        for stream in self._lines[name]:
            stream.write(f"{word}\n")
            stream.flush()
        return [str(stream.readline()) for stream in self._lines[name]]


@contextmanager
def stock_sets(names: Sequence[str], told: dict[str, Any], ranks: int) -> Iterator[None]:
    """Start the processes of the stock contenders; none of them outlives the context."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = []
    with tempfile.TemporaryDirectory(prefix="recover-bench-") as folder:
        try:
            for name in names:
                for rank in range(ranks):
                    mine = {"contender": name, "rank": rank, "store": f"{folder}/{name}"}
                    command = [sys.executable, str(ROOT / "benchmarks/stack_time_ranks.py")]
                    command.append(json.dumps(told | mine))
                    with (Path(folder) / f"{name}-{rank}.log").open("wb") as log:
                        processes.append(
                            subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                        )
            yield
            for process in processes:
                process.wait(timeout=60)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            failed = [p.args for p in processes if p.returncode]
            if failed:
                logs = sorted(Path(folder).glob("*.log"))
                print(*(log.read_text(errors="replace")[-2000:] for log in logs[:1]))


def report(case: dict[str, Any], replicas: int, turns: Turns) -> None:
    """Print the comparison of one stack."""
    ours = turns.told["recover"][0]
    print(
        f"\n{case['stack']}, {case['preset']}, {replicas} x {RANKS} ranks, "
        f"B = {case['microbatches']}, {ours['threads']} thread(s) per rank, "
        f"{len(turns.times['recover'])} rounds of {case['block']} steps"
    )
    losses = {name: told[-1]["loss"] for name, told in turns.told.items()}
    lowest, highest = min(losses.values()), max(losses.values())
    assert (highest - lowest) / lowest < 1e-3, f"the contenders do not do the same work: {losses}"
    print(f"  losses after the same steps agree to {(highest - lowest) / lowest:.1e}")
    for name, blocks in turns.times.items():
        line = f"  {name:24s} {1000 * median(blocks):9.1f} ms per step"
        if name != "recover":
            ratios = [a / b for a, b in zip(turns.times["recover"], blocks, strict=True)]
            spread = f"{percentile(ratios, 0.25):.3f} to {percentile(ratios, 0.75):.3f}"
            line += f"; ReCoVer / it {verdict(median(ratios), 1.02)}, quartiles {spread}"
        print(line)
    print("  MB per rank              parameters  optimizer  gradients   all   resident, more")
    for name, told in turns.told.items():
        parts = {part: max(rank["mb"][part] for rank in told) for part in told[0]["mb"]}
        resident = max(rank["resident_mb"] for rank in told)
        print(
            f"  {name:24s} {parts['parameters']:10.2f} {parts['optimizer']:10.2f} "
            f"{parts['gradients']:10.2f} {sum(parts.values()):7.2f} {resident:10.1f}"
        )


if __name__ == "__main__":
    main()
