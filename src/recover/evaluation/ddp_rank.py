"""One replica under torch's DDP over gloo, as torchrun starts it. Layer: evaluation.

The gradient is the sum over the step's microbatches, whoever ran them, divided by B, as ReCoVer's
is: DDP's own averaging would give the same. A communication hook does it, because only there can a
replica die with one bucket reduced and another not, and only there does the emulated network come
in. Reductions overlap with the last backward pass, as DDP does it.
"""

import contextlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from recover.evaluation.crew import JOURNAL
from recover.evaluation.journal import Journal, process_started
from recover.evaluation.recipe import DEADLY_BUCKET, Recipe, due, from_json, own_ids, present
from recover.launch import processes

if TYPE_CHECKING:
    from recover.evaluation.saving import Checkpoints

_COLLECTIVE_S = 600.0


class Reduction:
    """DDP's communication hook: sums buckets over all ranks, and dies in it when that is due."""

    def __init__(self, recipe: Recipe, journal: Journal, replica: int, deadly: int | None) -> None:
        self._recipe, self._journal = recipe, journal
        self._replica, self._deadly = replica, deadly
        self._step = 0
        self._works: list[dist.Work] = []

    def begin(self, step: int) -> None:
        """Start a step."""
        self._step = step
        self._works.clear()

    def reduce(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """Begin the reduction of a bucket that is complete; called by DDP."""
        if self._step == self._deadly and len(self._works) == DEADLY_BUCKET:
            self._works[0].wait()
            self._die()
        buffer, ranks = bucket.buffer(), dist.get_world_size()
        self._recipe.device.transfer(buffer.nbytes, ranks)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None, "this rank is in the group"
        self._works.append(work)
        divisor = self._recipe.task.microbatches
        done: Future[Tensor] = work.get_future().then(lambda sums: sums.value()[0].div_(divisor))
        return done

    def _die(self) -> NoReturn:
        self._journal.moment("failure", self._step, replica=float(self._replica))
        os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until the signal arrives
            signal.pause()


def main(out: Path, text: str, mode: str) -> None:
    """Train from the newest checkpoint, if there is one, to the last step."""
    processes.die_with_parent()
    rank, attempt = int(os.environ["RANK"]), _attempt()
    journal = Journal(out / JOURNAL, rank=rank, attempt=attempt)
    journal.write("moment", name="launch", time=process_started(), facts={"pid": os.getpid()})
    task = from_json(text)
    died_in = _steps_with_a_death(out)
    replica = present(task, int(os.environ["WORLD_SIZE"]), died_in)[rank]
    dist.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_S))
    recipe = Recipe(task)
    reduction = Reduction(recipe, journal, replica, due(task, replica, died_in))
    model = DistributedDataParallel(
        recipe.model, bucket_cap_mb=recipe.config.bucket_mb, gradient_as_bucket_view=True
    )
    model.register_comm_hook(None, reduction.reduce)
    checkpoints = _checkpoints(out, recipe, journal, mode)
    first = 0 if checkpoints is None else checkpoints.load()
    journal.moment("resumed" if attempt else "begun", first)
    for step in range(first, task.steps):
        loss = _step(recipe, model, reduction, step)
        if rank == 0:
            _report(journal, recipe, step, loss)
        if checkpoints is not None:
            checkpoints.committed(step)
    if checkpoints is not None:
        checkpoints.finish()
    journal.moment("finished", task.steps)
    os._exit(0)  # taking a gloo group apart can hang, and nothing is left to do


def _checkpoints(out: Path, recipe: Recipe, journal: Journal, mode: str) -> "Checkpoints | None":
    """Import what saves and loads, which takes seconds, only where something is saved."""
    if not recipe.task.checkpoint_every:
        return None
    from recover.evaluation.saving import Checkpoints

    return Checkpoints(out, recipe, journal, mode=mode)


def _step(recipe: Recipe, model: DistributedDataParallel, reduction: Reduction, step: int) -> float:
    """Run and commit one step; return the mean loss of its microbatches."""
    task, device = recipe.task, recipe.device
    reduction.begin(step)
    recipe.optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    ids = own_ids(step, task.microbatches, dist.get_rank(), dist.get_world_size())
    for microbatch_id in ids:
        last = microbatch_id == ids[-1]
        with contextlib.nullcontext() if last else model.no_sync():
            with device.forward():
                loss = model(recipe.text[microbatch_id])
            with device.backward():
                loss.backward()
        total += loss.detach()
    tally = dist.all_reduce(total, async_op=True)
    device.settle()
    assert tally is not None, "this rank is in the group"
    tally.wait()
    recipe.step_optimizer(step)
    return float(total) / task.microbatches


def _report(journal: Journal, recipe: Recipe, step: int, loss: float) -> None:
    task = recipe.task
    journal.write(
        "commit",
        step=step,
        loss=loss,
        microbatches=task.microbatches,
        tokens=task.microbatches * recipe.text.tokens_per_microbatch,
        devices=dist.get_world_size(),
    )


def _attempt() -> int:
    """Return how many times the job has been started before."""
    relaunched = int(os.environ.get("RECOVER_ATTEMPT", "0"))
    return relaunched + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _steps_with_a_death(out: Path) -> set[int]:
    lines = map(json.loads, (out / JOURNAL).read_text(encoding="utf-8").splitlines())
    return {line["step"] for line in lines if line.get("name") == "failure"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
