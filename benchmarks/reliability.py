"""How often does Open MPI itself fail when ranks are killed? Counts hangs, crashes, wrong sums.

``python -m benchmarks.reliability --trials 40`` runs streams of guarded all-reduces over real
processes. In each, ranks are killed in the stream; in every second trial more of them die within
20 ms of the start of a repair. Nobody supervises the ranks here, as ``recover run`` does: a hang is
a trial that does not end by itself.

Known: Open MPI 5.0.11 crashes where it learns of a death while it finishes a communicator with the
dead rank in it (``ompi_comm_activate`` waits for everybody before the communicator has collectives,
``ompi_comm_revoke_local`` calls them). That takes a death in a window of one agreement, some 0.1 ms
where every rank has a core and much longer on a busy machine.
"""

import argparse
import os
import random
import signal
import threading
import time
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.mpi.harness import Outcome, launch

from recover.core.drive import drive
from recover.core.effects import Agree, AnyEffect, Census, Leave, Regroup, Shrink
from recover.core.guard import Member, repair
from recover.core.mesh import Mesh
from recover.core.workload import Share

STEPS = 40
REPAIR_WINDOW_S = 0.02


@dataclass(frozen=True, slots=True)
class Doom:
    """How a rank dies."""

    step: int | None
    """Step of the stream; None: in the first repair."""
    during: bool
    """Inside the reduction, instead of before it."""
    delay_s: float = 0.0
    """Time from the start of the repair."""


def dooms(seed: int, mesh: Mesh, *, in_repair: bool) -> dict[int, Doom]:
    """Choose who dies and how; at least one replica is left."""
    chance = random.Random(seed)
    ranks = [r for r in range(mesh.world_size) if mesh.place(r).replica != seed % mesh.replicas]
    chance.shuffle(ranks)
    kills = chance.randint(1, max(1, len(ranks) // 2))
    fates = {r: Doom(chance.randrange(STEPS // 2), chance.random() < 0.7) for r in ranks[:kills]}
    if in_repair:
        for rank in ranks[kills : kills + chance.randint(1, 3)]:
            fates[rank] = Doom(None, False, chance.uniform(0, REPAIR_WINDOW_S))
    return fates


def play(seed: int, replicas: int, shards: int, elements: int, in_repair: bool) -> dict[str, Any]:
    """Go through one stream as this rank."""
    from recover.mpi.transport import ElementType, Span, UlfmTransport, join

    mesh = Mesh(replicas, shards)
    transport: UlfmTransport = join(mesh)
    member = Member(transport.place, mesh)
    rank = mesh.world_rank(member.place)
    fate = dooms(seed, mesh, in_repair=in_repair).get(rank)
    memory = array("d", bytes(8 * elements))
    span = Span(memory.buffer_info()[0], elements, ElementType.FLOAT64)
    survivors, repairs = mesh.everyone(), 0
    slowest_s = 0.0
    for step in range(STEPS):
        memory[:] = array("d", (float((rank + 1) * (step + 1)),)) * elements
        clean = transport.detect(True, span)
        if fate and fate.step == step:
            _die_soon(0.0) if fate.during else _die()
        clean = clean and transport.reduce(None, span)
        if fate and fate.step == step:
            _die()
        if transport.agree(clean):
            peers = [r * shards + member.place.shard + 1 for r in survivors]
            expected = float((step + 1) * sum(peers))
            assert set(memory) == {expected}, f"wrong sum: {set(memory)} is not {expected}"
            continue
        if fate and fate.step is None:
            _die_soon(fate.delay_s)
        began = time.monotonic()
        protocol = repair(member, Share(0, admitted=False), survivors)
        survivors = drive(protocol, lambda effect: _perform(transport, effect)).survivors
        slowest_s = max(slowest_s, time.monotonic() - began)
        repairs += 1
    transport.agree(True)
    return {"survivors": survivors, "repairs": repairs, "slowest_s": slowest_s}


def _perform(transport: Any, effect: AnyEffect) -> object:
    from recover.mpi.performer import perform_membership

    if isinstance(effect, Leave):
        _die()
    assert isinstance(effect, Agree | Shrink | Census | Regroup)
    return perform_membership(transport, effect)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_soon(delay_s: float) -> None:
    def run() -> None:
        time.sleep(delay_s)
        _die()

    threading.Thread(target=run, daemon=True).start()


def judge(outcome: Outcome, mesh: Mesh, doomed: set[int]) -> str:
    """Name what happened in one word or two."""
    condemned = {mesh.place(rank).replica for rank in doomed}
    expected = {r for r in range(mesh.world_size) if mesh.place(r).replica not in condemned}
    if outcome.hung:
        return "hang"
    if any("wrong sum" in error for error in outcome.errors.values()):
        return "wrong sum"
    if outcome.errors:
        return "error"
    facts = {(tuple(v["survivors"]), v["repairs"]) for v in outcome.values.values()}
    if len(facts) > 1:
        return "disagreement"
    crashed = expected - set(outcome.values)
    if crashed:
        return "all survivors crashed" if crashed == expected else "some survivors crashed"
    return "good"


def main() -> None:
    """Run the trials and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=40.0)
    parser.add_argument("--limit-s", type=float, default=1200.0)
    options = parser.parse_args()
    mesh = Mesh(options.replicas, options.shards)
    counts: dict[str, Counter[str]] = {"stream": Counter(), "repair": Counter()}
    kills: Counter[str] = Counter()
    slowest: list[float] = []
    give_up_at = time.monotonic() + options.limit_s
    for seed in range(options.seed, options.seed + options.trials):
        if time.monotonic() > give_up_at:
            print(f"stopped before seed {seed}: {options.limit_s:.0f} s are over")
            break
        kind = "repair" if seed % 2 else "stream"
        doomed = set(dooms(seed, mesh, in_repair=kind == "repair"))
        arguments = {
            "seed": seed,
            "replicas": mesh.replicas,
            "shards": mesh.ranks_per_replica,
            "elements": (32, 4_096, 131_072)[seed % 3],
            "in_repair": kind == "repair",
        }
        outcome = launch(
            "benchmarks.reliability:play", mesh.world_size, arguments, deadline_s=options.deadline_s
        )
        verdict = judge(outcome, mesh, doomed)
        counts[kind][verdict] += 1
        kills[kind] += len(doomed)
        slowest += [v["slowest_s"] for v in outcome.values.values()]
        if verdict != "good":
            shown = "\n".join(outcome.text.splitlines()[:40])
            print(f"seed {seed} ({kind}): {verdict}; doomed {sorted(doomed)}\n{shown}", flush=True)
    for kind, seen in counts.items():
        print(
            f"kills in the {kind}: {sum(seen.values())} trials, {kills[kind]} kills: {dict(seen)}"
        )
    if slowest:
        slowest.sort()
        print(f"slowest repair {slowest[-1]:.3f} s, median {slowest[len(slowest) // 2]:.3f} s")


if __name__ == "__main__":
    main()
