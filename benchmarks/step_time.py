"""Failure-free step time: ReCoVer against torch's DDP on gloo, and the protocol's share of a step.

    python -m benchmarks.step_time [--quick] [--preset tiny|small] [--replicas R ...]

Every contender trains the reference model in the *same processes*, each with its own copy of it:
the same text, microbatches, B, fp32, optimizer, clipping and number of threads. They take turns in
short blocks of steps, in rotating order; a block lasts from a barrier to a barrier. A ratio is that
of two blocks of one round; printed is its median over the rounds. Contenders:

    ReCoVer         the trainer's own loop
    ReCoVer, DDP    torch's DDP on the ulfm process group
    without votes   the trainer's own loop with Detect and Agree taken out (not fault tolerant)
    gloo, N MB      torch's DDP on gloo: no synchronisation but in the last backward pass, gradients
                    as views of its buckets, bucket_cap_mb swept; the fastest one is compared with

ReCoVer also reduces the loss and writes its records; DDP does neither. After one more step of each
the losses must agree, which shows that they do the same work.

The protocol's own share of a step is measured in ReCoVer's loop with each call of the transport
timed on the clock that all processes share. A vote (Detect, Agree) costs what it lasts from the
moment the *last* rank enters to the moment the last one leaves: before that, ranks wait for slower
ones, as they would in any all-reduce. To this is added the time of the slowest rank for everything
else that goes on during synchronisation (coroutine, performer, board, snapshots). The lower bound
counts a vote as the shortest stay of any rank.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import (
    describe_machine,
    finished_run,
    median,
    percentile,
    results,
    verdict,
)

CASES: dict[str, dict[str, Any]] = {
    "tiny": {"microbatches": 16, "sequences": 2, "sequence": 128, "bucket_mb": 25.0, "block": 4},
    "small": {"microbatches": 4, "sequences": 1, "sequence": 64, "bucket_mb": 25.0, "block": 2},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--preset", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    rounds = options.rounds or (2 if options.quick else 9)
    for name in options.preset:
        for replicas in options.replicas:
            told = CASES[name] | {
                "preset": name,
                "rounds": rounds,
                "gloo_bucket_mb": [1.0, 25.0],
                "protocol_steps": 6 if options.quick else 22,
            }
            with finished_run("step_time_ranks", told, replicas=replicas, deadline_s=240) as out:
                _print(name, replicas, told, results(out))


def _print(name: str, replicas: int, told: dict[str, Any], ranks: dict[int, Any]) -> None:
    first = ranks[0]
    print(
        f"\n{name}, {replicas} replicas, B = {told['microbatches']}, {first['gradient_mb']:.1f} MB "
        f"of gradients in {first['buckets']} buckets, {first['threads']} thread(s) per rank"
    )
    times = first["times"]
    fastest = min((n for n in times if n.startswith("gloo")), key=lambda n: median(times[n]))
    print("                 ms per step   time / DDP's on gloo (quartiles)")
    for contender, blocks in times.items():
        ratios = [a / b for a, b in zip(blocks, times[fastest], strict=True)]
        spread = f"{percentile(ratios, 0.25):.3f} to {percentile(ratios, 0.75):.3f}"
        told_ratio = f"{median(ratios):.3f} ({spread})"
        print(f"  {contender:14s} {1000 * median(blocks):10.1f}    {told_ratio}")
    _print_checks(first["losses"])
    for contender in ("ReCoVer", "ReCoVer, DDP"):
        ratios = [a / b for a, b in zip(times[contender], times[fastest], strict=True)]
        print(f"  {contender} / {fastest}: {verdict(median(ratios), 1.0)}")
    votes = [b / a for a, b in zip(times["ReCoVer"], times["without votes"], strict=True)]
    print(f"  step without votes / step: {median(votes):.3f}")
    _print_protocol(ranks)


def _print_checks(losses: dict[str, float]) -> None:
    lowest, highest = min(losses.values()), max(losses.values())
    difference = (highest - lowest) / lowest
    assert difference < 1e-3, f"the contenders do not do the same work: {losses}"
    print(f"  losses after the same steps agree to {difference:.1e}")


def _print_protocol(ranks: dict[int, Any]) -> None:
    upper, lower, steps, python = [], [], [], []
    for step in zip(*(rank["steps"] for rank in ranks.values()), strict=True):  # [rank]
        votes = list(zip(*(rank["votes"] for rank in step), strict=True))  # [vote][rank]
        upper.append(sum(_after_last_arrival(stays) for stays in votes))
        lower.append(sum(min(end - begin for begin, end in stays) for stays in votes))
        python.append(max(rank["sync_python"] for rank in step))
        steps.append(max(rank["step"] for rank in step))
    every = [step["votes"] for rank in ranks.values() for step in rank["steps"]]
    stayed = [sum(end - begin for begin, end in votes) for votes in every]
    coroutine = median([rank["coroutine"] for rank in ranks.values()])
    print(
        f"  protocol in a step of {1000 * median(steps):.1f} ms: votes {1000 * median(upper):.3f} "
        f"ms (shortest stays {1000 * median(lower):.3f}), rest {1000 * median(python):.3f} ms "
        f"(the pure coroutine {1000 * coroutine:.3f}); "
        f"stay in votes with waiting for slower ranks {1000 * median(stayed):.3f} ms"
    )
    for bound, costs in (("share", upper), ("lower bound", lower)):
        share = [(v + p) / s for v, p, s in zip(costs, python, steps, strict=True)]
        print(f"  protocol's {bound} of a step: {verdict(median(share), 0.02)}")


def _after_last_arrival(stays: Sequence[Sequence[float]]) -> float:
    return max(end for _, end in stays) - max(begin for begin, _ in stays)


if __name__ == "__main__":
    main()
