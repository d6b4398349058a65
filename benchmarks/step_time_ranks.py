"""One rank of the step-time benchmark; see :mod:`benchmarks.step_time`.

All contenders live in the same processes: each has its own copy of the model and its optimizer.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import recover
from benchmarks.measuring import arguments, leave_result
from recover.core.data import ExactLedger
from recover.core.drive import drive
from recover.core.effects import Accumulate, AnyEffect, NextBucket
from recover.core.iteration import JobState, iteration
from recover.mpi.transport import Operation, Span, UlfmTransport
from recover.train.job import Job
from recover.train.model import Decoder, build, preset
from recover.train.optim import adamw
from recover.train.text import TextWindows, load_text

CLIP_NORM, LEARNING_RATE = 1.0, 1e-3
Losses = Iterator[Tensor | float]
"""Runs one step each time that its next item, the mean loss, is asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders have in common."""

    job: Job
    text: TextWindows
    model: Callable[[], Decoder]
    sequence: int
    steps: int

    def tokens(self, microbatch: Tensor) -> Tensor:
        """Shorten a microbatch to the sequence that is trained on."""
        return microbatch[:, : self.sequence + 1]


# --- contenders ----------------------------------------------------------------------------


def with_recover(
    setting: Setting, name: str, transport: UlfmTransport, *, bucket_mb: float, ddp: bool = False
) -> Losses:
    """Train with ReCoVer: its own loop, or torch's DDP on the ulfm process group."""
    out = setting.job.out / name
    out.mkdir(exist_ok=True)
    job = dataclasses.replace(setting.job, transport=transport, out=out)
    model: nn.Module = setting.model()
    optimizer = adamw(model, peak=LEARNING_RATE)
    if ddp:
        model = DistributedDataParallel(model, process_group=job.process_group)
    trainer = recover.Trainer(job, model, optimizer, clip_norm=CLIP_NORM, bucket_mb=bucket_mb)
    for step in trainer.steps(setting.text, until=setting.steps):
        for microbatch in step:
            step.backward(model(setting.tokens(microbatch)))
        yield step.commit().loss


def with_gloo(setting: Setting, *, bucket_mb: float) -> Losses:
    """Train with torch's DDP as its documentation recommends: no_sync for all but the last."""
    job = setting.job
    accumulation = job.microbatches // job.replicas
    decoder = setting.model()
    optimizer = adamw(decoder, peak=LEARNING_RATE)
    model = DistributedDataParallel(
        decoder, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )  # the decoder has no buffers to broadcast
    for step in range(setting.steps):
        optimizer.zero_grad()
        losses = []
        first = step * job.microbatches + job.replica * accumulation
        for number in range(first, first + accumulation):
            microbatch = setting.tokens(setting.text[number])
            model.require_backward_grad_sync = number == first + accumulation - 1
            loss = model(microbatch) / accumulation
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(decoder.parameters(), CLIP_NORM)
        optimizer.step()
        yield torch.stack(losses).sum()


class Unguarded(UlfmTransport):
    """The transport without its votes: what is left of the data path if nobody may die."""

    def __init__(self, transport: UlfmTransport) -> None:
        self.__dict__.update(vars(transport))

    def detect(self, clean: bool, span: Span) -> bool:
        return clean

    def agree(self, clean: bool) -> bool:
        return clean


class Timed(UlfmTransport):
    """The transport, noting when each of its calls begins and ends on the common clock."""

    def __init__(self, transport: UlfmTransport) -> None:
        self.__dict__.update(vars(transport))
        self.votes: list[tuple[float, float]] = []
        self.moves: list[tuple[float, float]] = []

    def detect(self, clean: bool, span: Span) -> bool:
        begun_at = time.monotonic()
        outcome = super().detect(clean, span)
        self.votes.append((begun_at, time.monotonic()))
        return outcome

    def agree(self, clean: bool) -> bool:
        begun_at = time.monotonic()
        outcome = super().agree(clean)
        self.votes.append((begun_at, time.monotonic()))
        return outcome

    def reduce(
        self, send: Span | None, receive: Span, operation: Operation = Operation.SUM
    ) -> bool:
        begun_at = time.monotonic()
        outcome = super().reduce(send, receive, operation=operation)
        self.moves.append((begun_at, time.monotonic()))
        return outcome


# --- measurements --------------------------------------------------------------------------


def interleaved(contenders: dict[str, Losses], rounds: int, block: int) -> dict[str, list[float]]:
    """Run ``block`` steps of each contender in turn; return seconds per step of every block.

    A block lasts from a barrier to a barrier, so until its last rank is done. The order rotates.
    The first round warms up and is left out.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            MPI.COMM_WORLD.Barrier()
            started_at = time.monotonic()
            for _ in range(block):
                loss = next(contenders[name])
            MPI.COMM_WORLD.Barrier()
            if number:
                times[name].append((time.monotonic() - started_at) / block)
        del loss
    return times


def equal_work(contenders: dict[str, Losses]) -> dict[str, float]:
    """Return each contender's loss of the next step, the same step for all of them."""
    losses = {}
    for name, run in contenders.items():
        loss = next(run)
        if isinstance(loss, Tensor):  # gloo's contender knows this rank's part only
            dist.all_reduce(loss)
            loss = float(loss) / dist.get_world_size()
        losses[name] = loss
    return losses


def protocol(setting: Setting, *, bucket_mb: float) -> dict[str, Any]:
    """Run ReCoVer's loop with a timed transport; return the times of all of its steps.

    ``sync_python`` is this rank's time between the last backward pass and the verdict that was not
    spent in the transport: coroutine, performer, board, snapshots.
    """
    job = dataclasses.replace(setting.job, out=setting.job.out / "protocol")
    job.out.mkdir(exist_ok=True)
    transport = Timed(job.transport)
    job = dataclasses.replace(job, transport=transport)
    model = setting.model()
    optimizer = adamw(model, peak=LEARNING_RATE)
    trainer = recover.Trainer(job, model, optimizer, clip_norm=CLIP_NORM, bucket_mb=bucket_mb)
    steps = []
    for step in trainer.steps(setting.text, until=setting.steps):
        transport.votes, transport.moves = [], []
        begun_at = ready_at = time.monotonic()
        for microbatch in step:
            step.backward(model(setting.tokens(microbatch)))
            ready_at = time.monotonic()
        agreed_at = time.monotonic()
        inside = sum(end - begin for begin, end in transport.votes + transport.moves)
        votes = transport.votes
        step.commit()
        steps.append(
            {
                "step": time.monotonic() - begun_at,
                "votes": votes,
                "sync_python": agreed_at - ready_at - inside,
            }
        )
    return {"steps": steps[2:], "buckets": len(trainer.buckets)}


def coroutine_s(job: Job, buckets: int, rounds: int = 200) -> float:
    """Return the seconds that the pure protocol takes for one undisturbed iteration."""
    state = JobState(job.mesh.everyone(), ExactLedger())
    started_at = time.perf_counter()
    for _ in range(rounds):
        left = iter((*range(buckets), None))

        def answer(effect: AnyEffect, left: Iterator[int | None] = left) -> object:
            if isinstance(effect, NextBucket):
                return next(left)
            return None if isinstance(effect, Accumulate) else True

        drive(iteration(job.member, job.rules, state), answer)
    return (time.perf_counter() - started_at) / rounds


def main() -> None:
    """Run all measurements of one case."""
    told = arguments()
    job = recover.init(microbatches=told["microbatches"])
    shape = preset(told["preset"])
    text = TextWindows(
        load_text(), sequences_per_microbatch=told["sequences"], sequence=shape.sequence, seed=0
    )
    rounds, block = told["rounds"], told["block"]
    steps = (rounds + 1) * block + 1
    setting = Setting(job, text, lambda: build(shape, seed=0), told["sequence"], steps)
    dist.destroy_process_group()  # the replica's own world, of this rank alone
    dist.init_process_group(
        "gloo",
        store=FileStore(str(Path(job.out, "gloo")), job.replicas),
        rank=job.replica,
        world_size=job.replicas,
    )
    bucket_mb = told["bucket_mb"]
    contenders = {
        "ReCoVer": with_recover(setting, "plain", job.transport, bucket_mb=bucket_mb),
        "ReCoVer, DDP": with_recover(setting, "ddp", job.transport, bucket_mb=bucket_mb, ddp=True),
        "without votes": with_recover(
            setting, "unguarded", Unguarded(job.transport), bucket_mb=bucket_mb
        ),
    }
    for cap in told["gloo_bucket_mb"]:
        contenders[f"gloo, {cap:g} MB"] = with_gloo(setting, bucket_mb=cap)
    times = interleaved(contenders, rounds, block)
    losses = equal_work(contenders)
    for run in contenders.values():  # to the end, so that the job ends well
        for _ in run:
            pass
    few = dataclasses.replace(setting, steps=told["protocol_steps"])
    measured = protocol(few, bucket_mb=bucket_mb)
    leave_result(
        {
            "times": times,
            "losses": losses,
            **measured,
            "coroutine": coroutine_s(job, measured["buckets"]),
            "gradient_mb": sum(p.nbytes for p in setting.model().parameters()) / 2**20,
            "threads": torch.get_num_threads(),
        }
    )


if __name__ == "__main__":
    main()
