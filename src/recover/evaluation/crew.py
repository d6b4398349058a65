"""The processes of a contender: started, followed, and gone at the end. Layer: evaluation.

All carry a mark in their environment, by which they are found whoever their parent is by then.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import recover
from recover.errors import RecoverError
from recover.evaluation.journal import Follower, Line
from recover.launch import command, processes

JOURNAL = "journal.jsonl"
_MARK = "RECOVER_CONTENDER"
_TICK_S = 0.01
_GRACE_S = 8.0
_KILL_S = 10.0


class Crew:
    """A context manager that leaves no process of its own behind.

    ``out`` is made, and must not hold anything yet. ``on_line`` gets every line of the journal, or
    of another file that is ``followed``, in this thread; ``on_tick`` is called often.
    """

    def __init__(
        self,
        out: Path,
        *,
        deadline_s: float,
        ranks: int,
        on_line: Callable[[Line], None],
        on_tick: Callable[[], None] = lambda: None,
        followed: Path | None = None,
    ) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} holds something already; name a new directory")
        self.out = out.absolute()
        self.logs = self.out / "logs"
        self.logs.mkdir(parents=True)
        self._deadline_s = deadline_s
        self._gives_up_at = time.monotonic() + deadline_s
        self._ranks = ranks
        self._on_line, self._on_tick = on_line, on_tick
        self._follower = Follower(followed or self.out / JOURNAL)
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self._ask()
        give_up_at = time.monotonic() + _KILL_S
        while time.monotonic() < give_up_at:  # a process may fork while we look
            found = [pid for pid in self._marked() if processes.look(pid) is not None]
            if not found:
                break
            for pid in found:
                processes.send(pid, signal.SIGKILL)
            time.sleep(_TICK_S)
        for process in self._started:
            process.kill()
            process.wait()

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command; what it prints goes to ``logs/NAME.log``."""
        agent = (sys.executable, "-m", "recover.evaluation.agent", str(os.getpid()))
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [*agent, *words],
                env=self._environment() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to us alone
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> Path:
        """Return where a process's output goes."""
        return self.logs / f"{name}.log"

    def follow(self, done: Callable[[], bool]) -> None:
        """Hand on what the processes say until ``done()``; RecoverError after the deadline."""
        while True:
            over = done()  # asked before the last lines are read
            for line in self._follower.new_lines():
                self._on_line(line)
            self._on_tick()
            if over:
                return
            if time.monotonic() > self._gives_up_at:
                raise RecoverError(f"no end after {self._deadline_s:g} s; logs: {self.logs}")
            time.sleep(_TICK_S)

    def finish(self, **processes: subprocess.Popen[bytes]) -> None:
        """Follow processes to their ends; raise RecoverError as soon as one fails."""

        def over() -> bool:
            ended = self.ended(processes.values())
            for name, process in processes.items():
                self.require(name, process)
            return ended

        self.follow(over)

    def ended(self, processes: Iterable[subprocess.Popen[bytes]]) -> bool:
        """Whether all of them have ended."""
        status = [process.poll() for process in processes]  # of all: this is what reaps them
        return None not in status

    def require_alive(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Raise RecoverError if a process has ended that should run."""
        if process.poll() is not None:
            raise RecoverError(f"{name} ended early: {self._reason(name)}; logs: {self.logs}")

    def require(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Raise RecoverError, with the last thing that it said, if a process has failed."""
        if process.returncode:
            raise RecoverError(
                f"{name} ended with status {process.returncode}: {self._reason(name)}; "
                f"logs: {self.logs}"
            )

    def _reason(self, name: str) -> str:
        """Return what our launcher says of a job, or a log's last line, one with an error first."""
        logs = [self.log(name), *sorted(self.logs.rglob("stderr.log"))]
        said = [_lines(log) for log in logs]
        ours = [line for line in said[0] if line.startswith("recover: ")]
        errors = [lines[-1] for lines in said if "Error" in lines[-1]]
        return [*ours, *errors, said[0][-1]][0][:300]

    def _ask(self) -> None:
        """Let launchers of their own clean up behind themselves, if they are quick."""
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        give_up_at = time.monotonic() + _GRACE_S
        while not self.ended(self._started) and time.monotonic() < give_up_at:
            time.sleep(_TICK_S)

    def _environment(self) -> dict[str, str]:
        source = str(Path(recover.__file__).resolve().parents[1])
        path = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = command.threads_per_rank(command.available_cores(), self._ranks)
        return os.environ | {
            _MARK: str(self.out),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": str(threads),  # as many as `recover run` gives
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _marked(self) -> Iterator[int]:
        mark = f"{_MARK}={self.out}".encode()
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:  # gone, or another user's
                continue
            if mark in environment.split(b"\0"):
                yield int(entry.name)


def free_port() -> int:
    """Return a port of this host that nobody listens on."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return int(probe.getsockname()[1])


def _lines(log: Path) -> list[str]:
    said = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return [line.strip() for line in said if line.strip()] or ["nothing said"]
