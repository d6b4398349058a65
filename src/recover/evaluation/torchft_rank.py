"""One replica under torchft. Layer: evaluation.

Flat buckets go through ``Manager.allreduce``, which averages over the replicas that take part; its
DDP wrapper was seen to end survivors on gloo. A step that is thrown away is tried again with the
same microbatches; those of a dead replica drop out. Only what the library offers is used.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

from recover.evaluation.crew import JOURNAL
from recover.evaluation.journal import Journal, process_started
from recover.evaluation.recipe import DEADLY_BUCKET, Recipe, due, from_json, own_ids
from recover.launch import processes

_MANAGER_S = 10.0
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a reduced tally says about a step."""

    loss: float
    microbatches: int


class Buckets:
    """Flat copies of the gradients, last parameters first, and the tally of losses."""

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_mb: float) -> None:
        self._groups: list[list[nn.Parameter]] = [[]]
        room = limit = int(bucket_mb * 2**20)
        for parameter in reversed(parameters):
            if self._groups[-1] and parameter.nbytes > room:
                self._groups.append([])
                room = limit
            self._groups[-1].append(parameter)
            room -= parameter.nbytes

    def flat(self) -> list[Tensor]:
        """Return the gradients as flat tensors."""
        return [torch.cat([_grad(p).flatten() for p in group]) for group in self._groups]

    def take(self, flat: Sequence[Tensor]) -> None:
        """Write the reduced gradients back."""
        for group, tensor in zip(self._groups, flat, strict=True):
            parts = torch.split(tensor, [parameter.numel() for parameter in group])
            for parameter, part in zip(group, parts, strict=True):
                _grad(parameter).copy_(part.view_as(parameter))


class Replica:
    """Trains one replica until enough steps are committed."""

    def __init__(self, recipe: Recipe, manager: Manager, journal: Journal, replica: int) -> None:
        self._recipe, self._manager = recipe, manager
        self._journal, self._replica = journal, replica
        self._deadly = due(recipe.task, replica, ())
        self._buckets = Buckets(list(recipe.model.parameters()), recipe.config.bucket_mb)
        self._optimizer = Optimizer(manager, recipe.optimizer)

    def train(self) -> None:
        """Run steps until the last one is committed."""
        while self._manager.current_step() < self._recipe.task.steps:
            self._step()

    def _step(self) -> None:
        task, manager = self._recipe.task, self._manager
        self._optimizer.zero_grad()  # and look for a quorum meanwhile
        step = manager.current_step()
        tally = torch.zeros(2, dtype=torch.float64)  # losses and their number
        first = self._replica * task.accumulation
        ids = own_ids(step, task.microbatches, 0, 1)[first : first + task.accumulation]
        for microbatch_id in ids:
            with self._recipe.device.forward():
                loss = self._recipe.model(self._recipe.text[microbatch_id])
            with self._recipe.device.backward():
                (loss / task.accumulation).backward()
            tally += torch.tensor([float(loss), 1.0], dtype=torch.float64)
        self._reduce(step, tally)
        self._recipe.clip()
        self._recipe.set_learning_rate(step)
        before = manager.current_step()  # a replica that was healed has jumped
        self._optimizer.step()
        if manager.current_step() > before:
            self._report(before, tally)
        else:
            self._journal.moment("discarded", before, microbatches=task.accumulation)

    def _reduce(self, step: int, tally: Tensor) -> None:
        device, flat = self._recipe.device, self._buckets.flat()
        works: list[dist.Work] = []
        for number, tensor in enumerate([*flat, tally]):
            if step == self._deadly and number == DEADLY_BUCKET:
                works[0].wait()
                self._die(step)
            works.append(self._manager.allreduce(tensor))
            device.transfer(tensor.nbytes, max(1, self._manager.num_participants()))
        for work in works:
            work.wait()
        device.settle(done=self._manager.errored() is None)
        self._buckets.take(flat)

    def _report(self, step: int, tally: Tensor) -> None:
        devices = self._manager.num_participants()
        mean_loss, mean_number = tally.tolist()
        microbatches = round(mean_number * devices)
        self._journal.write(
            "commit",
            step=step,
            loss=mean_loss / mean_number,
            microbatches=microbatches,
            tokens=microbatches * self._recipe.text.tokens_per_microbatch,
            devices=devices,
        )

    def _die(self, step: int) -> NoReturn:
        self._journal.moment("failure", step, replica=self._replica)
        os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until the signal arrives
            signal.pause()


def main(out: Path, text: str, replica: int, gloo_s: float, heartbeat_ms: int) -> None:
    """Train with whoever is there."""
    processes.die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    journal = Journal(out / JOURNAL, rank=replica)
    journal.write("moment", name="launch", time=process_started(), facts={"pid": os.getpid()})
    recipe = Recipe(from_json(text))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        recipe.model.load_state_dict(state["model"])
        recipe.optimizer.load_state_dict(state["optimizer"])
        journal.moment("loaded")

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=gloo_s)),
        load_state_dict=load_state_dict,
        state_dict=lambda: {
            "model": recipe.model.state_dict(),
            "optimizer": recipe.optimizer.state_dict(),
        },
        min_replica_size=1,
        init_sync=False,  # equal by their seed; else the first step has one replica's share only
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=_MANAGER_S),
        heartbeat_interval=timedelta(milliseconds=heartbeat_ms),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
    )
    _wait_for_all(out, recipe.task.replicas, replica)
    Replica(recipe, manager, journal, replica).train()
    journal.moment("finished", recipe.task.steps)
    os._exit(0)  # shutting down waits for peers that may be gone


def _wait_for_all(out: Path, replicas: int, replica: int) -> None:
    """Begin together: else the first steps would be committed by those that were quicker."""
    (out / f"ready-{replica}").touch()
    give_up_at = time.monotonic() + _START_S
    while len(list(out.glob("ready-*"))) < replicas:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not all {replicas} replicas were ready after {_START_S:g} s")
        time.sleep(0.02)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter of the reference model is used"
    return parameter.grad


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
