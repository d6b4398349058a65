"""Text to microbatches: an id names the same tokens everywhere, a pass uses each chunk once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from recover.train.text import DEFAULT_TEXT_BYTES, Corpus, TextWindows, load_text


def corpus_of(path: Path, text: bytes) -> Corpus:
    path.write_bytes(text)
    return load_text([path])


@pytest.fixture
def counted(tmp_path: Path) -> Corpus:
    """251 bytes in which every byte names its position."""
    return corpus_of(tmp_path / "counted.txt", bytes(range(251)))


def windows_of(corpus: Corpus, seed: int = 0) -> TextWindows:
    return TextWindows(corpus, sequences_per_microbatch=3, sequence=10, seed=seed)


def test_the_default_text_is_large_quick_and_the_same_in_another_process() -> None:
    began = time.perf_counter()
    corpus = load_text()
    assert time.perf_counter() - began < 0.5
    assert 1_000_000 < corpus.tokens.size <= DEFAULT_TEXT_BYTES
    assert corpus.tokens.dtype == np.uint8
    assert np.mean(corpus.tokens < 128) > 0.99  # English and source, not tables of codes
    script = "from recover.train.text import load_text; print(load_text().content_hash)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.strip() == corpus.content_hash


def test_the_default_text_holds_no_tests_and_no_installed_packages() -> None:
    sources = load_text().sources
    assert len(set(sources)) == len(sources)
    assert not [s for s in sources if {"test", "tests", "site-packages"} & set(s.parts)]


def test_files_are_joined_in_the_given_order(tmp_path: Path) -> None:
    first, second = tmp_path / "b.txt", tmp_path / "a.txt"
    first.write_bytes(b"one")
    second.write_bytes("zwei ä\r\n".encode())
    corpus = load_text([first, second])
    assert corpus.tokens.tobytes() == b"one\n" + "zwei ä\r\n".encode()
    assert corpus.sources == (first, second)
    assert corpus.content_hash != load_text([second, first]).content_hash


def test_a_window_is_a_chunk_and_the_token_after_it(counted: Corpus) -> None:
    microbatch = windows_of(counted)[0]
    assert microbatch.shape == (3, 11)
    assert microbatch.dtype == torch.int64
    for row in microbatch:
        assert int(row[0]) % 10 == 0
        assert torch.equal(row, row[0] + torch.arange(11))


def test_every_chunk_is_used_once_in_every_pass(counted: Corpus) -> None:
    """25 chunks and 3 windows per microbatch: passes end in the middle of a microbatch."""
    windows = windows_of(counted)
    assert windows.chunks == 25
    rows = torch.cat([windows[k] for k in range(50)])  # (150, 11): six passes
    passes = rows[:, 0].reshape(6, 25) // 10  # (pass, place) -> chunk
    for order in passes:
        assert sorted(order.tolist()) == list(range(25))
    assert len({tuple(order.tolist()) for order in passes}) == 6


def test_a_pass_order_is_the_documented_permutation(counted: Corpus) -> None:
    windows = windows_of(counted, seed=5)
    rows = torch.cat([windows[k] for k in range(17)])[:50]  # (50, 11)
    for data_pass in range(2):
        expected = np.random.default_rng((5, data_pass)).permutation(25)
        chunks = rows[25 * data_pass : 25 * data_pass + 25, 0] // 10
        assert chunks.tolist() == expected.tolist()


def test_a_microbatch_is_a_pure_function_of_its_id(counted: Corpus) -> None:
    forward = [windows_of(counted)[k] for k in range(40)]
    shared = windows_of(counted)
    for k in reversed(range(40)):
        assert torch.equal(shared[k], forward[k])
    shared[3].zero_()
    assert torch.equal(shared[3], forward[3])
    assert torch.equal(shared[int(np.int64(4))], forward[4])
    assert not torch.equal(windows_of(counted, seed=1)[0], forward[0])
    assert shared[10**12].shape == (3, 11)


def test_a_text_of_one_window_repeats(tmp_path: Path) -> None:
    windows = windows_of(corpus_of(tmp_path / "short.txt", b"0123456789a"))
    assert windows.chunks == 1
    assert torch.equal(windows[0], windows[7])
    assert windows.tokens_per_microbatch == 30


def test_the_tail_is_short_and_unused(tmp_path: Path) -> None:
    assert windows_of(corpus_of(tmp_path / "t.txt", bytes(20))).chunks == 1
    assert windows_of(corpus_of(tmp_path / "u.txt", bytes(21))).chunks == 2


@pytest.mark.parametrize("case", ["missing", "directory", "empty", "fifo", "name too long"])
def test_unusable_files_are_named(tmp_path: Path, case: str) -> None:
    path = tmp_path / ("x" * 300 if case == "name too long" else "text")
    if case == "directory":
        path.mkdir()
    elif case == "empty":
        path.touch()
    elif case == "fifo":
        os.mkfifo(path)
    reason = {
        "missing": "does not exist",
        "directory": "is a directory",
        "empty": "0 bytes",
        "fifo": "is not a regular file",
        "name too long": "cannot be read",
    }[case]
    with pytest.raises(ValueError, match=f"{path}.*{reason}"):
        load_text([path])


def test_an_empty_file_among_others_is_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "full").write_bytes(b"text")
    corpus = load_text([tmp_path / "empty", tmp_path / "full"])
    assert corpus.tokens.tobytes() == b"\ntext"


def test_no_files_is_not_the_default_text() -> None:
    with pytest.raises(ValueError, match="list of text files is empty"):
        load_text([])


def test_a_text_below_one_window_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "short.txt", b"0123456789")
    with pytest.raises(ValueError, match=r"short\.txt \(10 bytes\).* need 11 bytes"):
        windows_of(corpus)


@pytest.mark.parametrize(
    ("rows", "sequence", "seed", "message"),
    [
        (0, 10, 0, "at least 1, got 0 and 10"),
        (1, 0, 0, "at least 1, got 1 and 0"),
        (1, 10, -1, "seed must not be negative, got -1"),
    ],
)
def test_impossible_sizes_are_refused(
    counted: Corpus, rows: int, sequence: int, seed: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TextWindows(counted, sequences_per_microbatch=rows, sequence=sequence, seed=seed)


def test_a_negative_id_is_refused(counted: Corpus) -> None:
    with pytest.raises(IndexError, match="start at 0, got -1"):
        windows_of(counted)[-1]
