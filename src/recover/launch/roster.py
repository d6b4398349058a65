"""Who of a job's ranks lives, and how the others ended. Layer: launch.

The launcher is not the parent of the ranks (mpirun is), so it knows them by what they leave in the
control directory (process id, board, end note) and by ``/proc``.
"""

from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from recover.launch import board, layout, note, outcome, postmortem, processes
from recover.launch.liveness import History, Sample, observe
from recover.launch.outcome import RankEnd


@dataclass(slots=True)
class Rank:
    """What is known of one rank."""

    world_rank: int
    pid: int | None = None
    born: int | None = None
    history: History | None = None
    gone: bool = False
    joined: bool = False
    sentence: RankEnd | None = None
    """How it ends, where the launcher ended it."""


class Roster:
    """All ranks of one job, as of the last look."""

    def __init__(self, world_size: int, *, control: Path, out: Path, view: mmap) -> None:
        self.ranks = [Rank(world_rank) for world_rank in range(world_size)]
        self.ends: list[RankEnd] = []
        """How those ended that did not finish, in the order in which they were found."""
        self.found_s: dict[int, float] = {}
        """When they were found, by world rank."""
        self.started_at_s: float | None = None
        """When the last rank's Python was first seen."""
        self.last_death_s = 0.0
        self._control = control
        self._out = out
        self._view = view

    @property
    def living(self) -> list[Rank]:
        """The ranks that are not known to be gone, in order."""
        return [rank for rank in self.ranks if not rank.gone]

    @property
    def all_joined(self) -> bool:
        """Whether every rank has joined MPI."""
        return all(rank.joined for rank in self.ranks)

    @property
    def finished(self) -> tuple[int, ...]:
        """The ranks that noted that they did everything."""
        notes = ((rank.world_rank, self._note(rank)) for rank in self.ranks)
        return tuple(world_rank for world_rank, ended in notes if ended and ended.finished)

    def readings(self) -> list[board.Reading]:
        """Return what all ranks have shown last."""
        return [board.read_slot(self._view, rank.world_rank) for rank in self.ranks]

    def look(self, now_s: float, *, mpirun_ended: bool) -> None:
        """Bring what is known of every rank up to date.

        ``mpirun_ended`` must have been asked *before*: then a rank without a process id will never
        have one.
        """
        for rank in self.living:
            state = self._state(rank)
            reading = board.read_slot(self._view, rank.world_rank)
            rank.joined = rank.joined or reading.phase not in (board.START, board.JOIN)
            if state is not None:
                sample = Sample(
                    reading.phase, reading.beats, reading.at_s, state.stopped, state.cpu_s
                )
                rank.history = observe(rank.history, sample, now_s)
            elif rank.pid is not None or mpirun_ended:
                self._bury(rank, now_s)
        if self.started_at_s is None and all(rank.pid is not None for rank in self.ranks):
            self.started_at_s = now_s

    def signal(self, rank: Rank, number: int) -> None:
        """Send a signal to a rank that may be gone."""
        if rank.pid is not None and processes.look(rank.pid) is not None:
            processes.send(rank.pid, number)

    def _state(self, rank: Rank) -> processes.ProcessState | None:
        if rank.pid is None:
            try:
                text = layout.pid_file(self._control, rank.world_rank).read_text(encoding="ascii")
                rank.pid = int(text)
            except (FileNotFoundError, ValueError):  # not there, or just being written
                return None
        state = processes.look(rank.pid)
        if state is not None and rank.born is None:
            rank.born = state.born
        return state if state is not None and state.born == rank.born else None

    def _bury(self, rank: Rank, now_s: float) -> None:
        """Note how a rank ended, and end the processes that it leaves behind."""
        rank.gone, self.last_death_s = True, now_s
        end = self._end_of(rank)
        if end is not None:
            self.ends.append(end)
            self.found_s[rank.world_rank] = now_s
        processes.kill_job(self._control, rank.world_rank)

    def _end_of(self, rank: Rank) -> RankEnd | None:
        ended = self._note(rank)
        if ended is None and rank.sentence is None:
            ended = postmortem.of_crash(self._control, self._out, rank.world_rank)
        if ended is not None and ended.kind == note.FINISHED:
            return None
        if rank.sentence is not None:
            return rank.sentence
        if ended is not None:
            return RankEnd(rank.world_rank, ended.kind, ended.reason)
        if rank.pid is None:
            return None
        reason = "died without a word (killed from outside, out of memory, or a crash)"
        return RankEnd(rank.world_rank, outcome.LOST, reason)

    def _note(self, rank: Rank) -> note.EndNote | None:
        return note.read(layout.end_file(self._control, rank.world_rank))
