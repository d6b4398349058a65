"""torchft 0.2: one lighthouse, one process per replica. Layer: evaluation.

A failure makes torchft throw the step away and go on with the replicas that are left and a smaller
batch: ``Commit.microbatches`` says so. Nobody replaces the dead.

Its settings were searched for the quickest recovery that raises no false alarms on a small machine:
see :class:`Tuning`. Gloo tells only a dead replica's neighbours at once; the others wait for
``gloo_s``, which must exceed the time between the first and the last replica's synchronisation.

Moments: ``launch``, ``failure``, ``discarded`` (one per survivor and step thrown away, with its
microbatches), ``loaded`` (a replica took another one's state), ``recovered`` (the first commit
after a failure).
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from recover.errors import RecoverError
from recover.evaluation import recipe
from recover.evaluation.contender import Commit, Moment, Task, Trace
from recover.evaluation.crew import Crew, free_port
from recover.evaluation.journal import Line

MISSING = "torchft is not installed; install it with `pip install 'recover[torchft]'`"


@dataclass(frozen=True, slots=True)
class Tuning:
    """torchft's own settings."""

    gloo_s: float = 1.0
    quorum_tick_ms: int = 10
    join_timeout_ms: int = 2000
    heartbeat_timeout_ms: int = 500
    heartbeat_ms: int = 25


def run(
    contender: str,
    task: Task,
    out: Path,
    *,
    deadline_s: float,
    on_commit: Callable[[Commit], None],
    tuning: Tuning | None = None,
) -> Trace:
    """Run ``torchft``; see ``contender.run``."""
    if importlib.util.find_spec("torchft") is None:
        raise RecoverError(MISSING)
    tuned = tuning or Tuning()
    chronicle = Chronicle(on_commit)
    crew = Crew(out, deadline_s=deadline_s, ranks=task.replicas, on_line=chronicle.add)
    with crew:
        port = free_port()
        lighthouse = crew.start("lighthouse", _lighthouse(port, tuned))
        told = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
        ranks = {
            r: crew.start(f"replica-{r}", _replica(crew, task, r, tuned), told)
            for r in range(task.replicas)
        }

        def over() -> bool:
            crew.require_alive("lighthouse", lighthouse)
            return crew.ended(ranks.values())

        crew.follow(over)
        for replica, process in ranks.items():
            if replica not in chronicle.dead:
                crew.require(f"replica-{replica}", process)
    chronicle.require(task)
    added = {"tuning": asdict(tuned), "torchft": version("torchft")}
    return chronicle.trace(contender, recipe.settings(task) | added)


def _lighthouse(port: int, tuned: Tuning) -> list[str]:
    return [
        str(Path(sys.executable).with_name("torchft_lighthouse")),
        *("--bind", f"[::]:{port}", "--min_replicas", "1"),
        *("--quorum_tick_ms", str(tuned.quorum_tick_ms)),
        *("--join_timeout_ms", str(tuned.join_timeout_ms)),
        *("--heartbeat_timeout_ms", str(tuned.heartbeat_timeout_ms)),
    ]


def _replica(crew: Crew, task: Task, replica: int, tuned: Tuning) -> list[str]:
    return [
        *(sys.executable, "-m", "recover.evaluation.torchft_rank", str(crew.out)),
        *(recipe.to_json(task), str(replica), str(tuned.gloo_s), str(tuned.heartbeat_ms)),
    ]


class Chronicle:
    """Makes commits and moments of what the replicas say; the first to commit a step speaks."""

    def __init__(self, on_commit: Callable[[Commit], None]) -> None:
        self._on_commit = on_commit
        self._commits: dict[int, Commit] = {}
        self._moments: list[Moment] = []
        self._open: list[Moment] = []
        self.dead: set[int] = set()

    def add(self, line: Line) -> None:
        """Take a line of the journal."""
        at = float(str(line["time"]))
        step = None if line.get("step") is None else int(str(line["step"]))
        if line["kind"] == "commit":
            assert step is not None, line
            self._commit(line, step, at)
            return
        facts = line["facts"]
        assert isinstance(facts, dict), line
        moment = Moment(str(line["name"]), at, step, {"replica": float(str(line["rank"])), **facts})
        self._moments.append(moment)
        if moment.name == "failure":
            self.dead.add(int(moment.facts["replica"]))
            self._open.append(moment)

    def require(self, task: Task) -> None:
        """Raise RecoverError unless all that was asked for has happened."""
        asked = {kill.replica for kill in task.kills}
        if asked != self.dead:
            raise RecoverError(f"replicas {sorted(asked)} were to die and {sorted(self.dead)} did")
        if set(self._commits) != set(range(task.steps)):
            raise RecoverError(f"{len(self._commits)} of {task.steps} steps were committed")

    def trace(self, contender: str, settings: dict[str, object]) -> Trace:
        """Return what has happened."""
        moments = sorted(self._moments, key=lambda moment: moment.time)
        commits = sorted(self._commits.values(), key=lambda commit: commit.time)
        return Trace(contender, tuple(commits), tuple(moments), settings)

    def _commit(self, line: Line, step: int, at: float) -> None:
        if step in self._commits:
            return
        values = {key: line[key] for key in ("loss", "microbatches", "tokens", "devices")}
        commit = Commit(step, **values, time=at)  # type: ignore[arg-type]
        self._commits[step] = commit
        if any(failure.time < at for failure in self._open):
            self._moments.append(Moment("recovered", at, step))
            self._open = [failure for failure in self._open if failure.time >= at]
        self._on_commit(commit)
