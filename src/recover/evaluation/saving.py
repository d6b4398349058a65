"""Checkpoints by torch's distributed checkpointing (DCP). Layer: evaluation.

``sync`` stops training until the checkpoint is on file. ``async`` copies the state and writes the
copy on a thread while training goes on, over a group of its own. Either way each rank writes its
part of the replicated state. A checkpoint counts once its metadata is there, which DCP puts in
place last, by renaming; the two newest ones are kept.
"""

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from recover.evaluation.journal import Journal
from recover.evaluation.recipe import Recipe

MODES = ("sync", "async")
_KEPT = 2


class Checkpoints:
    """Saves and loads what one rank trains; all ranks call every method alike."""

    def __init__(self, out: Path, recipe: Recipe, journal: Journal, *, mode: str) -> None:
        self._folder = out / "checkpoints"
        self._recipe, self._journal, self._mode = recipe, journal, mode
        self._every = recipe.task.checkpoint_every
        self._group = dist.new_group() if self._every and mode == "async" else None
        self._pending: Future[object] | None = None

    def load(self) -> int:
        """Load the newest complete checkpoint, if any; return the step to go on with."""
        found = self._complete()
        if not found:
            return 0
        self._moment("load_begin", found[-1])
        state = self._state()
        load(state, checkpoint_id=self._path(found[-1]))
        set_model_state_dict(self._recipe.model, state["model"])
        set_optimizer_state_dict(
            self._recipe.model, self._recipe.optimizer, optim_state_dict=state["optimizer"]
        )
        self._moment("load_end", found[-1])
        return found[-1]

    def committed(self, step: int) -> None:
        """Save after every N-th step, unless the run is over."""
        done = step + 1
        if not self._every or done % self._every or done >= self._recipe.task.steps:
            return
        self._moment("save_begin", done)
        self._wait()
        if self._mode == "sync":
            save(self._state(), checkpoint_id=self._path(done))
            self._tidy()
        else:
            saving = async_save(
                self._state(), checkpoint_id=self._path(done), process_group=self._group
            )
            assert isinstance(saving, Future), saving
            saving.add_done_callback(lambda _: self._moment("saved", done))
            self._pending = saving
        self._moment("save_end", done)

    def finish(self) -> None:
        """Wait for a checkpoint that is still being written."""
        self._wait()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
            self._tidy()

    def _state(self) -> dict[str, Any]:
        model, optimizer = self._recipe.model, self._recipe.optimizer
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }

    def _tidy(self) -> None:
        if dist.get_rank() == 0:
            for step in self._complete()[:-_KEPT]:
                shutil.rmtree(self._path(step))

    def _complete(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        return sorted(int(path.parent.name) for path in self._folder.glob("*/.metadata"))

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _moment(self, name: str, step: int) -> None:
        if dist.get_rank() == 0:
            self._journal.write("moment", name=name, step=step, facts={}, time=time.time())
