"""Real replicas of several ranks, without torch: they die as a unit, and only as a unit.

One job of two replicas is enough for several peers: whoever is blocked, and however, follows the
rank of its replica that dies. The victim leaves the time of its death behind; what a peer does in
between is observed from outside, by a child that its death sets free.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recover.launch import LaunchSpec, launch

from .conftest import SHORT, Run, Told

DEADLINE_S = 2.0
"""A peer takes milliseconds on a quiet machine."""
VANISHED = "died without a word (killed from outside, out of memory, or a crash)"

PREFACE = """
import os, signal, socket, subprocess, sys, threading, time
from recover.launch import layout, rank

me = rank.context()
here = me.world_rank
FOLDER = os.path.dirname(os.path.abspath(__file__))


def publish(name, text="x"):
    path = os.path.join(FOLDER, name)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def await_file(name):
    give_up_at = time.monotonic() + 20
    while not os.path.exists(os.path.join(FOLDER, name)):
        assert time.monotonic() < give_up_at, name
        time.sleep(0.001)


def note_the_time_of_death():
    # By a child that is no rank: the end of its input is the end of this process.
    noting = "cat; date +%s.%N > $0-new; mv $0-new $0"
    words = ["/bin/sh", "-c", noting, f"{FOLDER}/ended-{here}"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, env={"PATH": os.defpath})
    publish(f"ready-{here}")
    return child


def die_after(*others):
    for other in others:
        await_file(f"ready-{other}")
    time.sleep(0.2)  # they are inside what they are blocked in
    publish(f"killed-{here}", repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run_units(tmp_path: Path, write_script: Callable[..., Path]) -> Callable[..., Run]:
    """Run a script, after the preface, as a job of replicas of several ranks."""

    def run(source: str, *, replicas: int, ranks: int) -> Run:
        told, out = Told(), tmp_path / "run"
        script = write_script(PREFACE + source)
        spec = LaunchSpec(
            script=script, out=out, replicas=replicas, ranks_per_replica=ranks, timeouts=SHORT
        )
        return Run(launch(spec, told), told, out)

    return run


def delay_s(folder: Path, victim: int, peer: int) -> float:
    """Return how long a peer outlived the rank that it lost, to the end of its process."""
    ended, give_up_at = folder / f"ended-{peer}", time.monotonic() + DEADLINE_S
    while not ended.exists() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return float(ended.read_text()) - float((folder / f"killed-{victim}").read_text())


BLOCKED = """
match here:
    case 2:
        die_after(1, 0)
    case 1:
        child = note_the_time_of_death()
        time.sleep(300)
    case 0:
        child = note_the_time_of_death()
        ours, theirs = socket.socketpair()
        ours.recv(1)
    case 4:
        die_after(3, 5)
    case 3:
        child = note_the_time_of_death()
        while True:
            sum(range(100_000))
    case 5:
        child = note_the_time_of_death()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
print("here is", here)
"""


def test_peers_end_whatever_they_are_blocked_in(
    run_units: Callable[..., Run], tmp_path: Path
) -> None:
    run = run_units(BLOCKED, replicas=3, ranks=3)
    assert run.outcome.status == 0, run.reasons
    assert run.outcome.finished == (6, 7, 8)
    assert run.reasons == {
        2: VANISHED,
        0: "left with rank 2 of its replica",
        1: "left with rank 2 of its replica",
        4: VANISHED,
        3: "left with rank 4 of its replica",
        5: "left with rank 4 of its replica",
    }
    delays = {peer: delay_s(tmp_path, victim, peer) for victim, peer in PAIRS}
    print({peer: f"{1000 * delay:.1f} ms" for peer, delay in delays.items()})
    assert max(delays.values()) < DEADLINE_S, delays


PAIRS = ((2, 0), (2, 1), (4, 3), (4, 5))

# Nobody waits for the others in MPI: to it, an end with status 0 is no death that it must tell of.
FINISHED = """
if here == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
if here in (2, 3):
    time.sleep(60)
if here != 0:
    time.sleep(0.5)  # rank 0 is gone meanwhile
rank.note_end("finished", "done")
os._exit(0)
"""


def test_a_finished_rank_is_not_missed_and_a_stopped_one_takes_its_replica_along(
    run_units: Callable[..., Run],
) -> None:
    run = run_units(FINISHED, replicas=3, ranks=2)
    assert run.outcome.status == 0, run.reasons
    assert run.outcome.finished == (0, 1, 4, 5)
    assert run.reasons == {
        3: "stopped (SIGSTOP) for 1 s",
        2: "left with rank 3 of its replica",
    }


FAILING = """
match here:
    case 1:
        raise OSError("disk full")
    case 3:
        sys.exit(4)
    case 0 | 2:
        time.sleep(300)
"""


def test_a_peer_follows_a_rank_that_fails_by_itself(run_units: Callable[..., Run]) -> None:
    run = run_units(FAILING, replicas=3, ranks=2)
    assert run.outcome.status == 0, run.reasons
    assert run.outcome.finished == (4, 5)
    reasons = run.reasons
    assert "disk full" in reasons[1]
    assert "sys.exit(4)" in reasons[3]
    assert reasons[0] == "left with rank 1 of its replica"
    assert reasons[2] == "left with rank 3 of its replica"
    assert "replica" in run.outcome.summary or "rank" in run.outcome.summary


BUSY = """
import ctypes

match here:
    case 1:
        time.sleep(0.5)  # the other one is inside its call
        os.kill(os.getpid(), signal.SIGKILL)
    case 0:
        ctypes.PyDLL(None).sleep(30)  # holds the interpreter's lock
"""


def test_a_peer_that_cannot_leave_is_ended_by_the_launcher(run_units: Callable[..., Run]) -> None:
    run = run_units(BUSY, replicas=2, ranks=2)
    assert run.outcome.status == 0, run.reasons
    assert run.outcome.finished == (2, 3)
    assert run.reasons == {1: VANISHED, 0: "left with rank 1 of its replica"}
    assert any("is ended by the launcher" in notice for notice in run.told.notices)
