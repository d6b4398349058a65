"""Random jobs under random fire, one after the other, each checked from the outside.

    python benchmarks/chaos.py --runs 100 --seed 0

A seed decides everything that is decided here: replicas, B, where data comes from, the stack, how
buckets are reduced, who dies by schedule and where (several in one step, too), and who is shot from
outside, when. The exact moment of such a shot is up to the machine: it is there to hit the middle
of collectives. At least one replica is always spared, so every job must reach its end.

The checker shares no code with the library: it reads the records as JSON, does the arithmetic of
the invariant on them, and trains again in one process on the recorded microbatch ids. Results go to
a file; an interrupted series goes on where it stopped. The exit status is 1 on any violation, and
the line that runs a failing seed again is printed.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.chaos_checks import problems_of, read
else:  # a script finds its neighbours without the name of their directory
    from chaos_checks import problems_of, read

SUBJECT = Path(__file__).with_name("chaos_subject.py")
ANYWHERE = ("data", "microbatch", "backward", "reduce", "reduce", "consensus", "optimizer")
AFTER_ANOTHER = (*ANYWHERE, *("repair", "restore", "extra") * 2)
STEPS = 24
START_DEADLINE_S, RUN_DEADLINE_S = 180.0, 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One job and everything that happens to it."""

    seed: int
    replicas: int
    microbatches: int
    data: str
    stack: str
    in_place: bool
    steps: int
    faults: tuple[tuple[int, int, str], ...]
    """Step, replica and location of each death by schedule."""
    shots: tuple[tuple[int, int, float], ...]
    """Step, replica and seconds after that step's commit of each SIGKILL from outside."""

    def __str__(self) -> str:
        way = "in-place" if self.in_place else "out-of-place"
        faults = " ".join(f"{r}@{step}:{where}" for step, r, where in self.faults)
        shots = " ".join(f"{r}@{step}+{1000 * late:.0f}ms" for step, r, late in self.shots)
        job = f"R={self.replicas} B={self.microbatches:2d} {self.data:6s} {self.stack:5s} {way:12s}"
        return f"{job} | {faults or '-'} | {shots or '-'}"


def draw(seed: int) -> Plan:
    """Return the plan of a seed."""
    dice = random.Random(seed)
    replicas = dice.randint(3, 5)
    victims = dice.sample(range(replicas), dice.randint(1, replicas - 1))
    scheduled = victims[: dice.randint(0, len(victims))]
    faults: list[tuple[int, int, str]] = []
    for replica in scheduled:
        if faults and dice.random() < 0.6:
            faults.append((dice.choice(faults)[0], replica, dice.choice(AFTER_ANOTHER)))
        else:
            faults.append((dice.randrange(STEPS), replica, dice.choice(ANYWHERE)))
    shots = [
        (dice.randrange(STEPS - 1), replica, dice.uniform(0.0, 0.05))
        for replica in victims[len(scheduled) :]
    ]
    return Plan(
        seed=seed,
        replicas=replicas,
        microbatches=dice.randint(1, 3 * replicas),
        data=dice.choice(("exact", "exact", "stream")),
        stack=dice.choice(("plain", "ddp")),
        in_place=dice.random() < 0.5,
        steps=STEPS,
        faults=tuple(sorted(faults)),
        shots=tuple(sorted(shots)),
    )


# --- running -------------------------------------------------------------------------------


def run(plan: Plan, place: Path) -> tuple[int, float, str]:
    """Run a plan in the new directory ``place``; return status, seconds and what was said."""
    command = [sys.executable, "-c", "from recover.cli import app; app()", "run"]
    command += ["--replicas", str(plan.replicas), "--out", str(place / "run")]
    if plan.faults:
        command += ["--faults", str(write_faults(plan, place / "faults.yaml"))]
    command += [str(SUBJECT), json.dumps(asdict(plan)), str(place)]
    began = time.monotonic()
    with (place / "said.txt").open("wb") as said:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            shoot(plan, place, job)
            status = job.wait(RUN_DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            job.kill()  # the launcher's death ends the whole job
            job.wait()
    return status, time.monotonic() - began, (place / "said.txt").read_text(errors="replace")


def write_faults(plan: Plan, file: Path) -> Path:
    entries = [
        f"  - {{step: {step}, replica: {replica}, location: {where}}}"
        for step, replica, where in plan.faults
    ]
    file.write_text("\n".join(["faults:", *entries, ""]), encoding="utf-8")
    return file


def shoot(plan: Plan, place: Path, job: "subprocess.Popen[bytes]") -> None:
    """SIGKILL ranks from outside, each a moment after a step's line has come."""
    steps = place / "run" / "steps.jsonl"
    give_up_at = time.monotonic() + START_DEADLINE_S
    for step, replica, late_s in plan.shots:
        while job.poll() is None and lines_of(steps) <= step and time.monotonic() < give_up_at:
            time.sleep(0.0005)  # watches a file that somebody else writes
        time.sleep(late_s)  # the moment itself is part of the plan
        pid_file = place / f"pid-{replica}"
        if job.poll() is None and pid_file.exists():
            kill(int(pid_file.read_text(encoding="ascii")))


def lines_of(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill(pid: int) -> None:
    """SIGKILL a process if it is still a rank."""
    try:
        if b"recover.launch.bootstrap" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass  # it has died already


# --- the series ----------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next adds one")
    parser.add_argument("--results", type=Path, help="file to append to, and to go on from")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--keep", type=Path, help="directory for what failing runs leave behind")
    options = parser.parse_args(arguments)
    before = earlier(options.results)
    stop_at = time.monotonic() + 60 * options.minutes
    results: dict[int, list[str]] = {}
    seconds = []
    for seed in range(options.seed, options.seed + options.runs):
        if seed in before:
            results[seed] = before[seed]
            continue
        if time.monotonic() > stop_at:
            break
        results[seed], took_s = one(seed, options.keep)
        seconds.append(took_s)
        if options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"seed": seed, "problems": results[seed]}) + "\n")
    return summary(results, seconds, options.runs)


def one(seed: int, keep: Path | None) -> tuple[list[str], float]:
    """Run and check a seed; print its line."""
    plan = draw(seed)
    place = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
    status, took_s, said = run(plan, place)
    problems = [f"exit status {status}"] if status else []
    try:
        problems += problems_of(place, asdict(plan))
    except (OSError, ValueError, KeyError) as error:
        problems.append(f"unreadable: {type(error).__name__}: {error}")
    word, planned = "FAIL" if problems else "ok  ", len(plan.faults) + len(plan.shots)
    died = f"{plan.replicas - left(place)} of {planned} died"
    print(f"{seed:6d} {word} {took_s:5.1f} s | {died} | {plan}", flush=True)
    if problems:
        again = [sys.executable, sys.argv[0], "--runs", "1", "--seed", str(seed)]
        print("".join(f"         {problem}\n" for problem in problems[:10]) + said[-2000:])
        print(f"         run it again: {shlex.join(again)}", flush=True)
        if keep is not None:
            shutil.copytree(place, keep / place.name)
    shutil.rmtree(place)
    return problems, took_s


def left(place: Path) -> int:
    """Return how many replicas the last step on record has."""
    steps = read(place / "run" / "steps.jsonl")
    return len(steps[-1]["survivors"]) if steps else 0


def earlier(file: Path | None) -> dict[int, list[str]]:
    if file is None or not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    return {line["seed"]: line["problems"] for line in map(json.loads, lines)}


def summary(results: dict[int, list[str]], seconds: list[float], wanted: int) -> int:
    plans = [draw(seed) for seed in results]
    scheduled, shots = (sum(len(getattr(p, what)) for p in plans) for what in ("faults", "shots"))
    bad = sorted(seed for seed, problems in results.items() if problems)
    took = f", {sum(seconds):.0f} s for {len(seconds)} of them now" if seconds else ""
    print(
        f"{len(results)} of {wanted} runs{took}; {scheduled} deaths by schedule and {shots} shots "
        f"from outside; {len(bad)} runs with violations{f': seeds {bad}' if bad else ''}"
    )
    return 1 if bad or len(results) < wanted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
