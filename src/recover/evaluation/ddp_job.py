"""DDP over gloo: the reference, and checkpoint-restart under torchrun. Layer: evaluation.

Paper: 5, A.1.

After a failure torchrun ends what is left of the job and starts all replicas again; they load the
last complete checkpoint and rerun what came after it. As in the paper the full world comes back
("it restores the same configuration after each restart"), so a dead replica needs a spare that
waits for it, which no figure charges. ``checkpoint_shrinks`` has no spares: torchrun is started
again with one replica less for each that died, and B stays.

What makes it strong: failures are noticed by a process's exit within 20 ms, not by a timeout of the
collectives; survivors are ended at once; torchrun itself stays and only the replicas are started
again; checkpoints are written behind training; reductions overlap with backward passes. What it
cannot have is a process that has imported torch already: that is what a restart is.

Moments, the paper's points in brackets: ``begun``, ``save_begin`` (A), ``save_end`` (B; training
goes on), ``saved`` (on file, where that is later), ``failure`` (C), ``exit`` (D: no replica of the
first run is left), ``launch`` (the first replica of the next run starts), ``load_begin`` (E),
``load_end`` (F), ``resumed`` (G), ``rerun_end`` and ``recovered`` (H: the step that was hit is
committed). Without a complete checkpoint there is no E and F, and training starts over.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from recover.errors import RecoverError
from recover.evaluation import recipe
from recover.evaluation.contender import Commit, Moment, Task, Trace
from recover.evaluation.crew import Crew, free_port
from recover.evaluation.journal import Line
from recover.launch import processes

SAVE_MODE = "async"
"""What stops training for a shorter time, if it needs the processor longer; or ``sync``."""
_MONITOR_S = 0.02


def run(
    contender: str,
    task: Task,
    out: Path,
    *,
    deadline_s: float,
    on_commit: Callable[[Commit], None],
    save_mode: str = SAVE_MODE,
) -> Trace:
    """Run one of ``reference``, ``checkpoint``, ``checkpoint_shrinks``; see ``contender.run``.

    The reference ignores kills and checkpoints.
    """
    if contender == "reference":
        task = _undisturbed(task)
    chronicle = Chronicle(on_commit)
    crew = Crew(
        out,
        deadline_s=deadline_s,
        ranks=task.replicas,
        on_line=chronicle.add,
        on_tick=chronicle.look_for_exit,
    )
    with crew:
        if contender == "reference":
            _started(crew, task)
        elif contender == "checkpoint_shrinks":
            _relaunched(crew, task, save_mode, chronicle)
        else:
            restarts = len({kill.step for kill in task.kills})
            words = _torchrun(crew, task, save_mode, ranks=task.replicas, restarts=restarts)
            crew.finish(torchrun=crew.start("torchrun", words, _ENVIRONMENT))
    chronicle.require(task)
    added = {"save_mode": save_mode if task.checkpoint_every else "none", "monitor_s": _MONITOR_S}
    return chronicle.trace(contender, recipe.settings(task) | added)


def _started(crew: Crew, task: Task) -> None:
    """Start the replicas without torchrun: nobody has to be started again."""
    told = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(task.replicas),
    }
    words = [sys.executable, "-m", *_rank(crew, task, "none")]
    ranks = {
        f"rank-{rank}": crew.start(f"rank-{rank}", words, told | {"RANK": str(rank)})
        for rank in range(task.replicas)
    }
    crew.finish(**ranks)


def _relaunched(crew: Crew, task: Task, save_mode: str, chronicle: "Chronicle") -> None:
    """Start torchrun again with fewer replicas as long as replicas die."""
    for attempt in range(1 + len(task.kills)):
        before = chronicle.died_in
        dead = sum(kill.step in before for kill in task.kills)
        name = f"torchrun-{attempt}"
        words = _torchrun(crew, task, save_mode, ranks=task.replicas - dead, restarts=0)
        process = crew.start(name, words, _ENVIRONMENT | {"RECOVER_ATTEMPT": str(attempt)})
        crew.follow(partial(crew.ended, [process]))
        if chronicle.died_in == before:
            crew.require(name, process)
            return


# A store shared by all attempts would give the new ranks the addresses of dead ones.
_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _torchrun(crew: Crew, task: Task, save_mode: str, *, ranks: int, restarts: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"),
        *("--max-restarts", str(restarts), "--monitor-interval", str(_MONITOR_S)),
        *("--redirects", "3", "--log-dir", str(crew.logs)),
        *("-m", *_rank(crew, task, save_mode)),
    ]


def _rank(crew: Crew, task: Task, save_mode: str) -> list[str]:
    return ["recover.evaluation.ddp_rank", str(crew.out), recipe.to_json(task), save_mode]


def _undisturbed(task: Task) -> Task:
    return replace(task, kills=(), checkpoint_every=0)


class Chronicle:
    """Makes commits and moments of what the ranks say."""

    def __init__(self, on_commit: Callable[[Commit], None]) -> None:
        self._on_commit = on_commit
        self._commits: list[Commit] = []
        self._moments: list[Moment] = []
        self._done: set[int] = set()
        self._pids: dict[int, list[int]] = {}
        self._exiting: int | None = None
        self._open: list[Moment] = []
        self.died_in: frozenset[int] = frozenset()
        """Steps in which a replica has died."""

    def add(self, line: Line) -> None:
        """Take a line of the journal."""
        attempt = int(str(line["attempt"]))
        if line["kind"] == "commit":
            self._commit(line)
            return
        moment = Moment(
            str(line["name"]),
            float(str(line["time"])),
            None if line.get("step") is None else int(str(line["step"])),
            line["facts"] if isinstance(line["facts"], dict) else {},
        )
        if moment.name == "launch":
            self._pids.setdefault(attempt, []).append(int(moment.facts["pid"]))
        elif moment.name == "failure":
            self.died_in |= {int(str(moment.step))}
            self._open.append(moment)
            self._exiting = attempt
        if moment.name in ("launch", "failure") or line["rank"] == 0:
            self._moments.append(moment)

    def look_for_exit(self) -> None:
        """Note when nothing is left of a run that has failed."""
        if self._exiting is None:
            return
        if not any(processes.look(pid) for pid in self._pids[self._exiting]):
            self._moments.append(Moment("exit", time.time()))
            self._exiting = None

    def require(self, task: Task) -> None:
        """Raise RecoverError unless all that was asked for has happened."""
        asked = {kill.step for kill in task.kills}
        if asked != self.died_in:
            came = sorted(self.died_in)
            raise RecoverError(f"kills were asked for in steps {sorted(asked)} and came in {came}")
        if self._done != set(range(task.steps)):
            raise RecoverError(f"{len(self._done)} of {task.steps} steps were committed")

    def trace(self, contender: str, settings: dict[str, object]) -> Trace:
        """Return what has happened; of the launches of one run only the first."""
        launches: dict[int, Moment] = {}
        moments = [moment for moment in self._moments if moment.name != "launch"]
        runs = {pid: attempt for attempt, pids in self._pids.items() for pid in pids}
        for moment in sorted(self._moments, key=lambda m: m.time):
            if moment.name == "launch":
                launches.setdefault(runs[int(moment.facts["pid"])], moment)
        moments += launches.values()
        return Trace(
            contender,
            tuple(self._commits),
            tuple(sorted(moments, key=lambda moment: moment.time)),
            settings,
        )

    def _commit(self, line: Line) -> None:
        values = {key: line[key] for key in ("step", "loss", "microbatches", "tokens", "devices")}
        step, at = int(str(line["step"])), float(str(line["time"]))
        commit = Commit(**values, time=at, rerun=step in self._done)  # type: ignore[arg-type]
        self._commits.append(commit)
        self._done.add(step)
        recovered = [failure for failure in self._open if failure.step == step]
        if recovered:
            self._open = [failure for failure in self._open if failure.step != step]
            self._moments += [Moment("rerun_end", at, step), Moment("recovered", at, step)]
        self._on_commit(commit)
