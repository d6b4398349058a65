"""Real text as byte tokens, addressed by microbatch id.

Layer: `train`. The data ledger in the core hands out microbatch *ids*; this module turns an id into
tokens. Theory of operation:

- A corpus is a flat array of bytes; a token is a byte, so the vocabulary is 256 and any file works.
- The array is cut into chunks of `sequence` tokens that do not overlap. A window is a chunk and the
  one token after it, the last target. What is left at the end, less than one chunk, is not used.
- Windows are numbered without end. One *pass* over the text takes each chunk once, in an order
  that depends on the seed and the number of the pass only; then the next pass begins, in the middle
  of a microbatch if need be.
- Microbatch k holds windows k * n to k * n + n - 1. It is therefore a pure function of (corpus,
  seed, shape, k): any replica can compute any microbatch at any time, and a lost one can be run
  again elsewhere without a message (Section 4.2 asks for exactly that of the data).

Pass orders come from numpy's `default_rng`, which promises the same stream for one version of numpy
only: all ranks of a job must run the same one.
"""

from __future__ import annotations

import hashlib
import operator
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

VOCABULARY: Final = 256
DEFAULT_TEXT_BYTES: Final = 4_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The text of a run.

    tokens: (bytes,) uint8, read-only. sources: the files it came from, in order. content_hash:
    SHA-256 of the bytes in hex; equal hashes mean equal data, wherever the files lay.
    """

    tokens: npt.NDArray[np.uint8]
    sources: tuple[Path, ...]
    content_hash: str

    def describe(self) -> str:
        """Name the sources and the size in a few words, for errors and logs."""
        first = str(self.sources[0])
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{first}{more} ({self.tokens.size} bytes)"


def load_text(files: Sequence[Path] | None = None) -> Corpus:
    """Read the files in the given order, a newline between two, or the default text for None.

    The default is up to 4 MB of English and Python source out of this Python installation: the same
    for every rank that runs it, another one for another release of Python. Files are held in
    memory whole. Raises ValueError, naming the file, if there is nothing to train on.
    """
    if files is None:
        return _corpus(_default_files(), limit=DEFAULT_TEXT_BYTES)
    if not files:
        raise ValueError("the list of text files is empty; name one, or none for the default text")
    return _corpus(files, limit=None)


def _corpus(files: Iterable[Path], *, limit: int | None) -> Corpus:
    """Join the files, and stop as soon as `limit` bytes are there."""
    parts: list[bytes] = []
    sources: list[Path] = []
    size = 0
    for file in files:
        if limit is not None and size >= limit:
            break
        parts.append(_read(file))
        sources.append(file)
        size += len(parts[-1]) + 1  # and the newline
    if not any(parts):
        listed = ", ".join(str(source) for source in sources[:3])
        raise ValueError(f"no text: {listed or 'the default text'}: {len(sources)} files, 0 bytes")
    text = b"\n".join(parts)[:limit]
    return Corpus(
        tokens=np.frombuffer(text, dtype=np.uint8),
        sources=tuple(sources),
        content_hash=hashlib.sha256(text).hexdigest(),
    )


def _read(file: Path) -> bytes:
    try:
        if file.is_dir():
            raise ValueError(f"text file {file} is a directory; name the files in it")
        if not file.exists():
            raise ValueError(f"text file {file} does not exist")
        if not file.is_file():  # a pipe would give its bytes to one rank only
            raise ValueError(f"text file {file} is not a regular file")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"text file {file} cannot be read: {error.strerror}") from error


def _default_files() -> list[Path]:
    """List the English help texts, the licence, and the public top-level modules of Python.

    Subpackages stay out: tests and tables of character codes are poor text, and `site-packages`
    differs from one environment to the next. So do modules that differ from one host to the next.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    english = [library / "pydoc_data" / "topics.py", library / "LICENSE.txt", library / "LICENSE"]
    source = sorted(
        file
        for file in library.glob("*.py")
        if not file.name.startswith("_") and file.stem not in ("sitecustomize", "usercustomize")
    )
    found = [file for file in [*english, *source] if file.is_file()]
    if not found:
        raise ValueError(f"no default text: {library} holds no source files; name text files")
    return found


class TextWindows:
    """The microbatches of a corpus: `windows[k]` is microbatch k, for every k from 0.

    There is no end and so no length. Safe to share between threads.
    """

    def __init__(
        self, corpus: Corpus, *, sequences_per_microbatch: int, sequence: int, seed: int
    ) -> None:
        """Raise ValueError if a size is below 1, the seed below 0 or the text below one window."""
        if sequences_per_microbatch < 1 or sequence < 1:
            raise ValueError(
                "sequences_per_microbatch and sequence must be at least 1, "
                f"got {sequences_per_microbatch} and {sequence}"
            )
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        if corpus.tokens.size < sequence + 1:
            raise ValueError(
                f"the text is too short: {corpus.describe()}, but one sequence of {sequence} "
                f"tokens and its last target need {sequence + 1} bytes"
            )
        self.corpus = corpus
        self.sequences_per_microbatch = sequences_per_microbatch
        self.sequence = sequence
        self.seed = seed

    @property
    def chunks(self) -> int:
        """Return the number of windows in one pass over the text."""
        return (self.corpus.tokens.size - 1) // self.sequence

    @property
    def tokens_per_microbatch(self) -> int:
        """Return the number of tokens a microbatch trains on (its targets)."""
        return self.sequences_per_microbatch * self.sequence

    def __getitem__(self, microbatch_id: int) -> torch.Tensor:
        """Return microbatch `microbatch_id`, (sequences, sequence + 1) int64, a fresh tensor.

        Raises IndexError for a negative id. There is no upper end, so do not loop over the object.
        """
        number = operator.index(microbatch_id)
        if number < 0:
            raise IndexError(f"microbatch ids start at 0, got {number}")
        first = number * self.sequences_per_microbatch
        chunks = [self._chunk(first + row) for row in range(self.sequences_per_microbatch)]
        starts = np.array(chunks, dtype=np.int64) * self.sequence  # (sequences,)
        positions = starts[:, None] + np.arange(self.sequence + 1)  # (sequences, sequence + 1)
        return torch.from_numpy(self.corpus.tokens[positions].astype(np.int64))

    def _chunk(self, window: int) -> int:
        """Return which chunk of the text window number `window` is."""
        data_pass, place = divmod(window, self.chunks)
        return int(_pass_order(self.seed, data_pass, self.chunks)[place])


@lru_cache(maxsize=4)
def _pass_order(seed: int, data_pass: int, chunks: int) -> npt.NDArray[np.int64]:
    """Return the order of the chunks in one pass, a permutation, (chunks,) int64.

    Remembered because all microbatches of a pass need the same one.
    """
    return np.random.default_rng((seed, data_pass)).permutation(chunks)
