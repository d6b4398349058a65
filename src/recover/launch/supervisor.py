"""Watch one job until its last rank is gone, and say how it went. Layer: launch.

Theory of operation
-------------------
Until every rank has joined MPI no death can be survived, so the first one ends the job. From then
on a death is the survivors' business, and the supervisor only makes hangs into deaths
(:mod:`recover.launch.liveness`). It is over when no rank is left. mpirun is never asked how the job
went: with fault tolerance it returns 0 after a SIGKILLed rank.
"""

import signal
import subprocess
import time
from mmap import mmap
from pathlib import Path

from recover.launch import board, follow, layout, note, outcome, processes
from recover.launch.display import Display
from recover.launch.interrupts import Interrupts
from recover.launch.liveness import History, condemn
from recover.launch.outcome import Outcome, RankEnd
from recover.launch.roster import Rank, Roster
from recover.launch.spec import LaunchSpec

_POLL_S = 0.05
_LAST_WORDS_S = 1.0
"""How long ranks that fail together get to say why."""
_LEAVE_S = 1.0
"""How long the other ranks of a replica get to leave with one that died."""
_DETAIL_LINES = 5


class Clock:
    """Time that passed while this process was looking; a suspended launcher suspects nobody."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._seen_s = 0.0

    def now_s(self) -> float:
        """Return the time since the start, without gaps in which nobody asked."""
        now_s = time.monotonic()
        self._seen_s += min(now_s - self._last_s, 1.0)
        self._last_s = now_s
        return self._seen_s


class Supervisor:
    """The watch over one job; :meth:`supervise` is the whole of it."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        control: Path,
        view: mmap,
        mpirun: subprocess.Popen[bytes],
        display: Display,
        interrupts: Interrupts,
    ) -> None:
        self._spec = spec
        self._out = spec.out.absolute()
        self._control = control
        self._mpirun = mpirun
        self._display = display
        self._interrupts = interrupts
        self._clock = Clock()
        self._roster = Roster(spec.mesh.world_size, control=control, out=self._out, view=view)
        self._told = 0  # of the roster's ends, how many were passed on
        self._relay = follow.LogRelay(out=self._out, control=control)
        self._steps = follow.Tail(layout.steps_file(self._out))
        self._events = follow.Tail(layout.events_file(self._out))

    def supervise(self) -> Outcome:
        """Watch until the job is over, end what is left, and say how it went."""
        problem = None
        while problem is None and self._roster.living:
            problem = self._watch()
        if self._interrupts.received:
            self._ask_to_end()
        elif problem is not None:
            self._await_last_words()
        else:
            self._await_mpirun()
        processes.kill_job(self._control)
        while self._show():
            pass  # ends: nobody writes any more
        for line in self._relay.rest():
            self._display.on_line(line)
        return self._outcome(problem)

    # --- while it runs -----------------------------------------------------------------------

    def _watch(self) -> str | None:
        """Look once; return why the job cannot go on, if it cannot."""
        now_s = self._clock.now_s()
        self._look(now_s)
        self._show()
        problem = self._problem(now_s)
        if problem is None and self._roster.living:
            self._notify(now_s)
            self._end_torn_replicas(now_s)
            self._make_hangs_deaths(now_s)
            time.sleep(_POLL_S)
        return problem

    def _look(self, now_s: float) -> None:
        mpirun_ended = self._mpirun.poll() is not None
        self._roster.look(now_s, mpirun_ended=mpirun_ended)

    def _problem(self, now_s: float) -> str | None:
        if self._interrupts.received:
            return f"ended by {signal.Signals(self._interrupts.received[0]).name}"
        if not self._roster.all_joined:
            return self._start_problem(now_s)
        if self._mpirun.returncode is not None and self._roster.living:
            return f"mpirun ended before its ranks (status {self._mpirun.returncode})"
        return None

    def _start_problem(self, now_s: float) -> str | None:
        """Return why a job whose ranks have not all joined cannot go on, if it cannot."""
        limits, ranks, started_at_s = (
            self._spec.timeouts,
            self._roster.ranks,
            self._roster.started_at_s,
        )
        if any(rank.gone and not rank.joined for rank in ranks):
            return "a rank ended before it had joined the others"
        if started_at_s is None and now_s >= limits.start_s:
            silent = [rank.world_rank for rank in ranks if rank.pid is None]
            return f"ranks {silent} did not start within {limits.start_s:g} s"
        if started_at_s is not None and now_s - started_at_s >= limits.join_s:
            silent = [rank.world_rank for rank in ranks if not rank.joined]
            return f"ranks {silent} did not join MPI within {limits.join_s:g} s"
        return None

    def _end_torn_replicas(self, now_s: float) -> None:
        """End what is left of a replica whose other ranks should have left by themselves.

        One that holds the interpreter's lock in a long call cannot.
        """
        mesh = self._spec.mesh
        lost = {
            mesh.place(world_rank).replica: world_rank
            for world_rank, found_s in self._roster.found_s.items()
            if now_s - found_s >= _LEAVE_S
        }
        for rank in self._roster.living:
            replica = mesh.place(rank.world_rank).replica
            if replica in lost and rank.sentence is None:
                reason = f"left with rank {lost[replica]} of its replica"
                self._sentence(rank, RankEnd(rank.world_rank, note.CONDEMNED, reason))

    def _make_hangs_deaths(self, now_s: float) -> None:
        histories: dict[int, History] = {}
        for rank in self._roster.living:
            if rank.history is None or rank.sentence is not None:
                continue
            if rank.history.sample.phase != board.EXIT:
                histories[rank.world_rank] = rank.history
            elif rank.history.silent_s(now_s) >= self._spec.timeouts.exit_grace_s:
                self._roster.signal(rank, signal.SIGKILL)
        condemned = condemn(
            histories, now_s, self._spec.timeouts, last_death_s=self._roster.last_death_s
        )
        for world_rank, reason in condemned.items():
            end = RankEnd(world_rank, outcome.HANG, reason)
            self._sentence(self._roster.ranks[world_rank], end)

    def _sentence(self, rank: Rank, end: RankEnd) -> None:
        rank.sentence = end
        self._display.on_notice(f"{self._name(rank)} is ended by the launcher: {end.reason}")
        self._roster.signal(rank, signal.SIGKILL)

    def _notify(self, now_s: float) -> None:
        """Tell of ranks that failed, once it is clear that the job goes on without them."""
        if now_s - self._roster.last_death_s < _LAST_WORDS_S:
            return
        for end in self._roster.ends[self._told :]:
            if end.kind == note.FAILED:
                name = self._name(self._roster.ranks[end.world_rank])
                self._display.on_notice(f"{name} failed: {end.reason}")
        self._told = len(self._roster.ends)

    def _show(self) -> bool:
        """Pass on what is new; return whether anything was."""
        lines = self._relay.lines(rank.world_rank for rank in self._roster.living)
        steps, events = list(follow.records(self._steps)), list(follow.records(self._events))
        for line in lines:
            self._display.on_line(line)
        for record in events:  # written before the step that they belong to
            self._display.on_event(record)
        for record in steps:
            self._display.on_step(record)
        return bool(lines or steps or events)

    # --- the end -----------------------------------------------------------------------------

    def _ask_to_end(self) -> None:
        """Let the ranks flush what they have; a second interrupt ends that."""
        asked = self._roster.living
        for rank in asked:
            self._roster.signal(rank, signal.SIGTERM)
        give_up_at = time.monotonic() + self._spec.timeouts.stop_grace_s
        while time.monotonic() < give_up_at and len(self._interrupts.received) < 2:
            if all(rank.pid is None or processes.look(rank.pid) is None for rank in asked):
                return
            time.sleep(_POLL_S)

    def _await_last_words(self) -> None:
        """Let ranks that fail for the same reason say so."""
        give_up_at = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < give_up_at and not self._interrupts.received:
            if not self._roster.living:
                return
            self._look(self._clock.now_s())
            time.sleep(_POLL_S)

    def _await_mpirun(self) -> None:
        give_up_at = time.monotonic() + self._spec.timeouts.exit_grace_s
        while time.monotonic() < give_up_at and not self._interrupts.received:
            if self._mpirun.poll() is not None:
                return
            time.sleep(_POLL_S)

    def _outcome(self, problem: str | None) -> Outcome:
        finished, ends = self._roster.finished, self._roster.ends
        if problem is None and any(end.world_rank in finished for end in ends):
            problem = "the training did, but the script failed after it"
        if problem is None and not finished:
            problem = self._no_one_finished()
        spoke = any(rank.joined for rank in self._roster.ranks) or any(
            end.kind == note.FAILED for end in ends
        )
        return Outcome(
            mesh=self._spec.mesh,
            out=self._out,
            finished=finished,
            ends=tuple(ends),
            problem=problem or "",
            signal=self._interrupts.received[0] if self._interrupts.received else 0,
            details=() if spoke or problem is None else self._mpirun_said(),
        )

    def _no_one_finished(self) -> str:
        last = max(self._roster.readings(), key=lambda shown: (shown.until > 0, shown.step))
        where = f" (step {last.step} of {last.until})" if last.until else ""
        if all(end.kind == note.LEFT for end in self._roster.ends):
            return f"the script ended before the training did{where}"
        return f"no replica is left{where}"

    def _mpirun_said(self) -> tuple[str, ...]:
        text = layout.mpirun_log(self._out).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip("- \t")]
        return tuple(lines[:_DETAIL_LINES])

    def _name(self, rank: Rank) -> str:
        if self._spec.ranks_per_replica == 1:
            return f"replica {rank.world_rank}"
        return f"rank {rank.world_rank} (replica {self._spec.mesh.place(rank.world_rank)})"
