"""What launcher and ranks share through files: the board, logs, and the control directory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recover.launch import board, control, layout, note
from recover.launch.board import Board, Reading
from recover.launch.follow import LogRelay, Tail, records

# --- the board ---------------------------------------------------------------------------------


def test_a_slot_shows_what_its_rank_wrote_last(tmp_path: Path) -> None:
    view = board.create(tmp_path / "board", 3)
    mine = Board(tmp_path / "board", 1)
    mine.beat("compute")
    mine.progress(step=4, until=9)
    shown = board.read_slot(view, 1)
    assert shown == mine.read()
    assert (shown.beats, shown.step, shown.until, shown.phase) == (2, 4, 9, "compute")
    assert mine.read_all()[0] == mine.read_all()[2] == Reading(0, 0.0, 0, 0, board.START)


def test_a_long_phase_is_cut(tmp_path: Path) -> None:
    board.create(tmp_path / "board", 1)
    mine = Board(tmp_path / "board", 0)
    mine.beat("x" * 100)
    assert mine.read().phase == "x" * 40


def test_a_writer_that_is_stopped_anywhere_leaves_its_last_beat(tmp_path: Path) -> None:
    """A busy machine does that to ranks: it takes the core away in the middle of a beat."""
    path = tmp_path / "board"
    view = board.create(path, 1)
    writer = subprocess.Popen([sys.executable, "-c", BEATS_FOR_EVER, str(path)])
    try:
        while not board.read_slot(view, 0).until:
            assert writer.poll() is None
        for _ in range(400):
            os.kill(writer.pid, signal.SIGSTOP)
            os.waitpid(writer.pid, os.WUNTRACED)
            shown = board.read_slot(view, 0)
            assert shown.phase == "working"
            assert shown.step == shown.until == shown.beats - 1
            os.kill(writer.pid, signal.SIGCONT)
            time.sleep(0.0005)
    finally:
        writer.kill()
        writer.wait()


BEATS_FOR_EVER = """
import sys
from itertools import count
from pathlib import Path
from recover.launch.board import Board
board = Board(Path(sys.argv[1]), 0)
board.beat("working")
for n in count(1):
    board.progress(step=n, until=n)
"""


# --- following ---------------------------------------------------------------------------------


def test_a_tail_returns_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    path.write_bytes(b"one\ntwo\n\xff\nrest")
    assert tail.lines() == ["two", "\N{REPLACEMENT CHARACTER}"]
    assert tail.lines() == []
    assert tail.rest() == ["rest"]


def test_records_pass_over_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\nnonsense\n[1]\n{"step": 1}\n{"st')
    assert list(records(Tail(path))) == [{"step": 0}, {"step": 1}]


def test_a_relay_goes_on_with_the_next_rank_and_hides_details(tmp_path: Path) -> None:
    layout.logs(tmp_path).mkdir()
    first, second = (layout.rank_log(tmp_path, rank) for rank in (0, 1))
    relay = LogRelay(out=tmp_path, control=tmp_path)
    first.write_text("a\n")
    second.write_text("hidden\n")
    assert relay.lines([0, 1]) == ["a"]
    first.write_text("a\nb\nTraceback\n")
    ended = note.EndNote(note.FAILED, "x", step=None, log_bytes=4, finished=False)
    note.write(layout.end_file(tmp_path, 0), ended)
    second.write_text("hidden\nc\nNBC_Progress: an error 75 was found\n\nd\n")
    assert relay.lines([1]) == ["b", "c", "d"]
    assert relay.lines([]) == []


# --- the control directory ---------------------------------------------------------------------


def test_a_control_directory_is_private_short_and_removed() -> None:
    with control.Control(ranks=1) as made:
        assert made.path.stat().st_mode & 0o777 == 0o700
        assert len(str(made.path)) < 30
        assert control.launcher_lives(made.path)
        assert made.path not in control.remove_stale()
    assert not made.path.exists()
    assert not control.launcher_lives(made.path)


def test_a_directory_whose_launcher_is_gone_is_removed() -> None:
    code = (
        "import os; from recover.launch.control import Control; "
        "print(Control(1).path, flush=True); os._exit(0)"
    )
    source = str(Path(control.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    left = Path(done.stdout.strip())
    assert left.is_dir()
    control.remove_stale()
    assert not left.exists()


@pytest.mark.parametrize(("needed", "roomy"), [(1, True), (1 << 60, False)])
def test_memory_is_used_where_there_is_enough(needed: int, roomy: bool) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    assert (control.choose_parent(needed) == Path("/dev/shm")) is roomy
