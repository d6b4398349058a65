"""All-reduce bandwidth of the guarded path against bare ``MPI_Allreduce``.

    python -m benchmarks.bandwidth [--quick]

The guarded path is what a gradient bucket goes through in an undisturbed step: a vote
(``UlfmTransport.detect``) and the out-of-place sum (``UlfmTransport.reduce``). The bare path is one
``Allreduce`` of mpi4py on the same buffers of the same processes, with buffer objects made in
advance. Blocks of both alternate, and each block lasts from a barrier to a barrier, so until its
last rank is done. The ratio is bare time over guarded time of a pair of neighbouring blocks, its
median over the pairs; 0.97 means that the guarded path has 97 % of the bandwidth.

Needs no torch. Both paths run under the launcher's flags, fault tolerance included: what that costs
the bare path is not measured here.
"""

import argparse
from typing import Any

from benchmarks.measuring import (
    describe_machine,
    finished_run,
    median,
    percentile,
    results,
    verdict,
)

KIB, MIB = 2**10, 2**20
TARGET, TARGET_FROM_BYTES = 0.97, 4 * MIB


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 16 MB, few rounds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=0, help="pairs of blocks per size")
    options = parser.parse_args()
    sizes = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
    sizes += [] if options.quick else [64 * MIB, 256 * MIB]
    rounds = options.rounds or (5 if options.quick else 31)
    print(describe_machine(), flush=True)
    print("ranks  size      bare GB/s  guarded GB/s  ratio (quartiles)")
    worst: dict[str, float] = {}
    for ranks in options.ranks:
        told = {"sizes": sizes, "rounds": rounds}
        with finished_run("bandwidth_ranks", told, replicas=ranks, deadline_s=200) as out:
            rows = results(out)[0]
        for row in rows:
            ratio = _print(ranks, row)
            if row["bytes"] >= TARGET_FROM_BYTES:
                worst[f"{ranks} ranks, {row['bytes'] // MIB} MB"] = ratio
    where = min(worst, key=lambda name: worst[name])
    print(f"lowest ratio from 4 MB on: {verdict(worst[where], TARGET, at_least=True)}, {where}")


def _print(ranks: int, row: dict[str, Any]) -> float:
    """Print one size and return its ratio."""
    nbytes, bare, guarded = row["bytes"], row["bare"], row["guarded"]
    ratios = [b / g for b, g in zip(bare, guarded, strict=True)]
    size = f"{nbytes // MIB} MB" if nbytes >= MIB else f"{nbytes // KIB} KB"
    speeds = [nbytes / median(times) / 1e9 for times in (bare, guarded)]
    spread = f"{percentile(ratios, 0.25):.3f} to {percentile(ratios, 0.75):.3f}"
    print(
        f"{ranks:5d}  {size:8s}  {speeds[0]:9.2f}  {speeds[1]:12.2f}  "
        f"{median(ratios):.3f} ({spread})",
        flush=True,
    )
    return median(ratios)


if __name__ == "__main__":
    main()
