"""Time that one death costs: from SIGKILL to the commit of the step that was hit.

    python -m benchmarks.recovery_time [--quick]

Jobs of 4 replicas train the tiny model (B = 16) and lose three of them, in different steps: in
backward, inside the all-reduce of a bucket, before the vote on the step. The victim writes down the
time right before it kills itself; survivors write down when each microbatch and each commit was
done; all on the clock that the processes of a machine share. The last survivor counts throughout.

    gross = last commit of the step - SIGKILL
    net   = last commit of the step
            - the later of SIGKILL and the end of the last planned microbatch    (they run anyway)
            - (end of the last extra microbatch - begin of the last survivor's first one)
            - synchronisation and commit of an undisturbed step, median over the steps that
              follow with the same survivors                             (the step needs it anyway)

Net time is what the failure cost beside the microbatches that had to be run again: noticing the
death, the reductions that came to nothing, the verdict, shrink, census, agreement, restoration.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import describe_machine, finished_run, median, percentile, verdict
from recover.core.schedule import Fault, FaultSchedule, Location
from recover.faults import dump
from recover.records import EventRecord, RunRecord, read_run

REPLICAS, KILLS_PER_RUN = 4, 3
FIRST, EVERY = 4, 5
"""Steps of the first death and between two; those between show the undisturbed time."""
STEPS = FIRST + KILLS_PER_RUN * EVERY
SETTINGS = {"microbatches": 16, "bucket_mb": 1.0, "steps": STEPS}
LOCATIONS = ((Location.REDUCE, 0), (Location.BACKWARD, None), (Location.CONSENSUS, None))
TARGET_S = 0.1

Times = Mapping[int, Sequence[Mapping[str, Any]]]
"""What each replica wrote down, step by step."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One death and what it cost, in seconds."""

    location: str
    world: int
    """Replicas before it."""
    gross_s: float
    net_s: float
    extra_s: float
    """Subtracted: extra microbatches."""
    undisturbed_s: float
    """Subtracted: synchronisation and commit of an undisturbed step."""
    event: EventRecord


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two runs")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    kills: list[Kill] = []
    for run in range(options.runs or (2 if options.quick else 14)):
        faults = schedule(run, options.seed)
        with finished_run(
            "recovery_time_ranks",
            SETTINGS,
            replicas=REPLICAS,
            deadline_s=120,
            faults=dump(faults),
        ) as out:
            kills += measured(out, faults)
    report(kills)


def schedule(run: int, seed: int) -> FaultSchedule:
    """Return three deaths; who and where depends on the run."""
    choose = random.Random(f"{seed} {run}")
    victims = choose.sample(range(REPLICAS), KILLS_PER_RUN)
    faults = []
    for number, victim in enumerate(victims):
        location, bucket = LOCATIONS[(run + number) % len(LOCATIONS)]
        step = FIRST + number * EVERY
        faults.append(Fault(step, victim, rank=0, location=location, bucket=bucket))
    return FaultSchedule(tuple(faults))


def measured(out: Path, faults: FaultSchedule) -> list[Kill]:
    """Return what each death of a finished run cost."""
    run = read_run(out)
    times = {
        replica: [json.loads(line) for line in file.read_text().splitlines()]
        for replica in range(REPLICAS)
        if (file := out / f"times-{replica}.jsonl").exists()
    }
    kills = []
    for fault in faults.faults:
        killed_at = float((out / f"killed-{fault.replica}").read_text())
        kills.append(_measured(run, times, fault, killed_at))
    return kills


def _measured(run: RunRecord, times: Times, fault: Fault, killed_at: float) -> Kill:
    (event,) = (event for event in run.events if event.step == fault.step)
    survivors = run.steps[fault.step].survivors
    hit = {r: times[r][fault.step] for r in survivors}
    planned = {r: len(hit[r]["done"]) - event.extra[r] for r in survivors}
    ready_at = max(hit[r]["done"][planned[r] - 1] for r in survivors)
    again = [r for r in survivors if event.extra[r]]
    extra_s = 0.0
    if again:
        begun_at = max(hit[r]["begun"][planned[r]] for r in again)
        extra_s = max(hit[r]["done"][-1] for r in again) - begun_at
    committed_at = max(hit[r]["committed"] for r in survivors)
    following = range(fault.step + 1, fault.step + EVERY)
    undisturbed_s = median([_tail([times[r][s] for r in survivors]) for s in following])
    return Kill(
        location=str(fault.location),
        world=len(survivors) + 1,
        gross_s=committed_at - killed_at,
        net_s=committed_at - max(killed_at, ready_at) - extra_s - undisturbed_s,
        extra_s=extra_s,
        undisturbed_s=undisturbed_s,
        event=event,
    )


def _tail(step: Sequence[Mapping[str, Any]]) -> float:
    """Return the time from the last gradient to the last commit of an undisturbed step."""
    committed_at: float = max(rank["committed"] for rank in step)
    ready_at: float = max(rank["done"][-1] for rank in step)
    return committed_at - ready_at


def report(kills: Sequence[Kill]) -> None:
    """Print medians, and whether the target is met."""
    groups: dict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        groups[f"in {kill.location}"].append(kill)
    for kill in sorted(kills, key=lambda kill: -kill.world):
        groups[f"{kill.world} -> {kill.world - 1} replicas"].append(kill)
    groups["all"] = list(kills)
    print("                     kills  net ms: median    p90    max   gross ms: median")
    for name, group in groups.items():
        net = [1000 * kill.net_s for kill in group]
        gross = median([1000 * kill.gross_s for kill in group])
        print(
            f"  {name:18s} {len(group):5d}  {median(net):14.1f} {percentile(net, 0.9):6.1f} "
            f"{max(net):6.1f}   {gross:16.1f}"
        )
    parts = {
        "extra microbatches": [kill.extra_s for kill in kills],
        "an undisturbed synchronisation and commit": [kill.undisturbed_s for kill in kills],
    }
    for name, seconds in parts.items():
        print(f"  subtracted, median: {1000 * median(seconds):.1f} ms for {name}")
    inside = {
        "noticing (in the collective that failed, with waiting)": "detect_s",
        "shrink, census, agreement": "repair_s",
        "restoring": "restore_s",
    }
    for name, field in inside.items():
        seconds = [float(getattr(kill.event, field)) for kill in kills]
        print(f"  of the recovery, median: {1000 * median(seconds):.1f} ms {name}")
    print(f"  median net time: {verdict(median([k.net_s for k in kills]), TARGET_S)} s")


if __name__ == "__main__":
    main()
