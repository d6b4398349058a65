"""What a death costs where a replica is several ranks, and whether two columns agree on two deaths.

    python -m benchmarks.unit_kills --runs 20 [--stacks fsdp2 pp] [--out FILE]
    python -m benchmarks.unit_kills --pairs 50

**Kills.** Jobs of 4 replicas of 2 ranks train the tiny model (B = 16) and lose three replicas, by
the death of one rank each. The victim writes down the time right before it kills itself; survivors
write down when each microbatch (of a pipeline: each pass) and each commit was done, all on the
clock that the processes of a machine share. The last survivor counts.

    cost = last commit of the step that was hit - SIGKILL - extra microbatches (``extra_s``)
    net  = the same from the end of the last planned microbatch on, if that is later (they run
           anyway, and a death in forward comes long before)

"forward" and "backward" find the peers inside an all-gather or reduce-scatter of FSDP, or inside a
receive of the pipeline. A death in "repair" comes while others recover from another one in the same
step; the cost is counted from the second death on.

**Pairs.** Jobs that lose two ranks at once, of two replicas and in different columns (shard 0 of
one, shard 1 of the other), at a location drawn from the seed. A job that does not reach its end in
time is a hang; records that break the invariant or other ids than without failures are violations.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import describe_machine, finished_run, median, percentile, verdict
from recover.core.schedule import AFTER_A_FAILURE, Fault, FaultSchedule, Location, ordered
from recover.faults import dump
from recover.records import RunRecord, check_run, read_run

REPLICAS, RANKS, MICROBATCHES = 4, 2, 16
STACKS = ("fsdp2", "pp")
ALONE = (Location.FORWARD, Location.BACKWARD, Location.REDUCE, Location.CONSENSUS)
HIT_IN = (3, 6, 9)
STEPS = 12
TARGET_S = 0.5
DEADLINE_S = 180.0

Times = Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
"""What each rank (replica, shard) wrote down, step by step."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One death and what it cost, in seconds."""

    stack: str
    location: str
    shard: int
    cost_s: float
    net_s: float
    extra_s: float
    """Subtracted from both."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=0, help="jobs of three deaths")
    parser.add_argument("--pairs", type=int, default=0, help="jobs of two deaths at once")
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=STACKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for one JSON line per death")
    options = parser.parse_args()
    if options.runs < 0 or options.pairs < 0 or options.runs + options.pairs == 0:
        parser.error("say how many: --runs or --pairs, 1 or more")
    print(describe_machine(), flush=True)
    kills: list[Kill] = []
    for run in range(options.runs):
        kills += measured_run(run, options.stacks[run % len(options.stacks)], options.seed)
    if kills:
        report(kills)
        if options.out is not None:
            lines = [f"{json.dumps(asdict(kill))}\n" for kill in kills]
            options.out.write_text("".join(lines), encoding="utf-8")
    if options.pairs:
        run_pairs(options.pairs, options.stacks, options.seed)


# --- single deaths -------------------------------------------------------------------------


def measured_run(run: int, stack: str, seed: int) -> list[Kill]:
    """Run one job; return what its deaths cost."""
    faults = schedule(run, seed)
    with finished_run(
        "unit_kills_ranks",
        settings(stack, STEPS),
        replicas=REPLICAS,
        ranks_per_replica=RANKS,
        deadline_s=DEADLINE_S,
        faults=dump(faults),
    ) as out:
        return list(costs(out, faults, stack))


def settings(stack: str, steps: int) -> dict[str, Any]:
    """Return what the ranks are told."""
    return {"stack": stack, "microbatches": MICROBATCHES, "steps": steps, "bucket_mb": 1.0}


def schedule(run: int, seed: int) -> FaultSchedule:
    """Return three deaths in different steps, or one and two that share a step: the second of
    them in the repair of the first. Who dies is drawn; locations and shards take turns."""
    victims = random.Random(f"{seed} {run}").sample(range(REPLICAS), len(HIT_IN))
    in_repair = run // len(STACKS) % 2 == 1
    faults = []
    for number, victim in enumerate(victims):
        turn = run * len(HIT_IN) + number
        location, shard = ALONE[turn % len(ALONE)], turn // len(ALONE) % RANKS
        step = HIT_IN[number]
        if in_repair and number == 2:
            step, location, shard = HIT_IN[1], Location.REPAIR, run // 4 % RANKS
        faults.append(Fault(step, victim, shard, location))
    return ordered(faults)


def costs(out: Path, faults: FaultSchedule, stack: str) -> Iterator[Kill]:
    """Yield what each death of a finished run cost; one that a second one followed is left out."""
    run, times = read_run(out), read_times(out)
    repairs = {fault.step for fault in faults.faults if fault.location is Location.REPAIR}
    for fault in faults.faults:
        if fault.step in repairs and fault.location is not Location.REPAIR:
            continue
        killed_at = float((out / f"killed-{fault.replica}-{fault.rank}").read_text())
        yield cost(run, times, fault, killed_at, stack)


def cost(run: RunRecord, times: Times, fault: Fault, killed_at: float, stack: str) -> Kill:
    """Return what one death cost."""
    survivors = run.steps[fault.step].survivors
    events = [event for event in run.events if event.step == fault.step]
    extra_s = sum(event.extra_s for event in events)
    again = {r: sum(event.extra.get(r, 0) for event in events) for r in survivors}
    hit = {(r, s): times[r, s][fault.step] for r in survivors for s in range(RANKS)}
    committed_at = max(rank["committed"] for rank in hit.values())
    planned_until = max(rank["done"][-1 - again[r]] for (r, _), rank in hit.items())
    return Kill(
        stack=stack,
        location=str(fault.location),
        shard=fault.rank,
        cost_s=committed_at - killed_at - extra_s,
        net_s=committed_at - max(killed_at, planned_until) - extra_s,
        extra_s=extra_s,
    )


def read_times(out: Path) -> Times:
    """Read what the ranks wrote down."""
    return {
        (replica, shard): [json.loads(line) for line in file.read_text().splitlines()]
        for replica in range(REPLICAS)
        for shard in range(RANKS)
        if (file := out / f"times-{replica}-{shard}.jsonl").exists()
    }


def report(kills: Sequence[Kill]) -> None:
    """Print the table, and whether the target is met."""
    groups: dict[str, list[Kill]] = defaultdict(list)
    for kill in sorted(kills, key=lambda k: (k.stack, list(Location).index(Location(k.location)))):
        groups[f"{kill.stack} {kill.location}"].append(kill)
    for kill in sorted(kills, key=lambda k: k.shard):
        groups[f"shard {kill.shard}"].append(kill)
    groups["all"] = list(kills)
    print("                     kills  cost ms: median     p90   worst   net ms: median   worst")
    for name, group in groups.items():
        cost = [1000 * kill.cost_s for kill in group]
        net = [1000 * kill.net_s for kill in group]
        print(
            f"  {name:18s} {len(group):5d}  {median(cost):15.1f} {percentile(cost, 0.9):7.1f} "
            f"{max(cost):7.1f}   {median(net):14.1f} {max(net):7.1f}"
        )
    extra = median([kill.extra_s for kill in kills])
    print(f"  subtracted, median: {1000 * extra:.1f} ms for extra microbatches")
    print(f"  median cost: {verdict(median([kill.cost_s for kill in kills]), TARGET_S)} s")


# --- two columns at once -------------------------------------------------------------------


def run_pairs(count: int, stacks: Sequence[str], seed: int) -> None:
    """Run the jobs; print what went wrong, and how many did."""
    hangs = violations = 0
    for number in range(count):
        stack, faults = stacks[number % len(stacks)], pair(number, seed)
        told = f"pair {number}, {stack}: {'; '.join(map(str, faults.faults))}"
        try:
            with finished_run(
                "unit_kills_ranks",
                settings(stack, steps=5),
                replicas=REPLICAS,
                ranks_per_replica=RANKS,
                deadline_s=DEADLINE_S,
                faults=dump(faults),
            ) as out:
                problems = list(problems_of(read_run(out), faults))
        except SystemExit as unfinished:
            hangs += 1
            print(f"{told}: not finished: {unfinished}", flush=True)
            continue
        violations += bool(problems)
        for problem in problems:
            print(f"{told}: {problem}", flush=True)
    print(
        f"  {count} pairs in two columns: {hangs} not finished, {violations} violations (target 0)"
    )


def pair(number: int, seed: int) -> FaultSchedule:
    """Return the deaths of two ranks in different columns, at the same place of the same step."""
    choose = random.Random(f"{seed} pair {number}")
    locations = [location for location in Location if location not in AFTER_A_FAILURE]
    location = choose.choice(locations)
    bucket = choose.choice((0, None)) if location is Location.REDUCE else None
    first, second = choose.sample(range(REPLICAS), 2)
    return ordered([Fault(2, first, 0, location, bucket), Fault(2, second, 1, location, bucket)])


def problems_of(run: RunRecord, faults: FaultSchedule) -> Iterator[str]:
    """Yield what a run with these deaths should not have done."""
    yield from (*run.problems, *check_run(run))
    for step in run.steps:
        ids = sorted(number for mine in step.ids.values() for number in mine)
        if ids != list(range(MICROBATCHES * step.step, MICROBATCHES * (step.step + 1))):
            yield f"step {step.step} committed {ids}"
    left = set(range(REPLICAS)) - {fault.replica for fault in faults.faults}
    if set(run.steps[-1].survivors) != left:
        yield f"{run.steps[-1].survivors} survived instead of {sorted(left)}"


if __name__ == "__main__":
    main()
