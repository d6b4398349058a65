"""The simulator's command line: ``python -m recover.sim``. Layer: sim."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recover.sim.adversary import sparse
from recover.sim.gradients import Violation
from recover.sim.job import Job, parse_replay, play
from recover.sim.scenario import parse as parse_scenario
from recover.sim.search import explore, run_seed
from recover.sim.trace import Trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return the exit status: 1 for a broken rule, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        print(_run(options))
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    except Violation as broken:
        print(f"VIOLATION: {broken}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recover.sim",
        description="Drive the protocol through failures, with virtual ranks and checked sums.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="one random job, its trace")
    what.add_argument("--replay", metavar="RUN", help="the run that a failure message names")
    what.add_argument("--scenario", type=Path, metavar="FILE", help="a scripted run, its trace")
    what.add_argument("--swarm", type=int, metavar="SEEDS", help="seeds 0..SEEDS-1")
    what.add_argument(
        "--exhaustive",
        type=int,
        nargs=4,
        metavar=("R", "S", "B", "KILLS"),
        help="every schedule: replicas, shards, microbatches, deaths",
    )
    what.add_argument(
        "--rewrite", type=Path, nargs="+", metavar="FILE", help="write anew what a script traces"
    )
    parser.add_argument("--job", default="", help="more about --exhaustive: key=value pairs")
    parser.add_argument(
        "--subsets",
        type=int,
        metavar="N",
        help="with --exhaustive, --replay: up to N ranks any subset may see a collective fail",
    )
    return parser


def _run(options: argparse.Namespace) -> str:
    if options.seed is not None:
        return _seed(options.seed)
    if options.replay is not None:
        return _replay(options.replay, options.subsets)
    if options.scenario is not None:
        return parse_scenario(options.scenario.read_text()).run()
    if options.rewrite is not None:
        for path in options.rewrite:
            path.write_text(parse_scenario(path.read_text()).rewritten())
        return f"{len(options.rewrite)} files written: review them"
    if options.swarm is not None:
        return _swarm(options.swarm)
    replicas, shards, microbatches, kills = options.exhaustive
    shape = f"memory=spoiled buckets=1 replicas={replicas} shards={shards} "
    job = Job.parse(f"{shape} microbatches={microbatches} kills={kills} {options.job}")
    done = explore(job, every_subset_up_to=options.subsets or 4)
    return f"{job}: {done.schedules} schedules, {done.states} states, no rule broken"


def _seed(seed: int) -> str:
    traces: list[Trace] = []

    def trace(job: Job) -> list[Trace]:
        print(f"seed {seed}: {job}")
        traces.append(Trace(job.shards))
        return traces

    try:
        run_seed(seed, observers=trace)
    finally:
        print(traces[0].text())
    return "no rule broken"


def _replay(run: str, subsets: int | None) -> str:
    job, picks = parse_replay(run)
    adversary = sparse(picks, job.budget(), every_subset_up_to=subsets)
    trace = Trace(job.shards)
    try:
        play(job, adversary, observers=(trace,))
    finally:
        print(trace.text())
    return "no rule broken"


def _swarm(seeds: int) -> str:
    strikes = 0
    for seed in range(seeds):
        strikes += len(run_seed(seed)[1])
    return f"{seeds} seeds, {strikes} random moves, no rule broken"


if __name__ == "__main__":
    sys.exit(main())
