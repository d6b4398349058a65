"""Nanotron inside each replica: Path 2 of Appendix C. Layer: adapters.

    job = nanotron.init(microbatches=64)              # instead of recover.init
    trainer = DistributedTrainer("config.yaml")       # Nanotron's own; dp: 1
    nanotron.attach(job, trainer)
    trainer.train(loader)

Theory of operation
-------------------
A replica is a whole Nanotron job of data-parallel size 1: tensor, pipeline and expert groups lie in
its own world, and everything that Nanotron does over its data-parallel group is done by a group of
one. The data-parallel dimension proper is ``job.process_group``; nothing of Nanotron's touches it.

Nanotron adds each microbatch's 16-bit gradient to fp32 buffers and its optimizer reads those. A
:class:`Gradient` puts our accumulator where the buffer was, and our reduced gradient when it is
there: no copy either way. So a pass accumulates as ever, and only after its last microbatch, when
no stage waits for another, the protocol reduces; a failure leads to one more pass, of another
length, into the same accumulators.

Two things of the pipeline engines would make passes of different lengths add up wrongly or not at
all: they divide losses by the number of microbatches, and 1F1B refuses fewer than stages - 1.
:class:`Pipeline` undoes the one and runs such a short pass all-forward-all-backward.

What follows a commit is Nanotron's own: sum tied weights, clip, step the optimizer.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recover
from recover.records import StepRecord
from recover.tensors.holders import Holder
from recover.train.job import Job
from recover.train.source import Data
from recover.train.step import Step

Microbatch = Mapping[str, Any]
"""Inputs by name: tensors, or TensorPointers on the stages that do not read them."""


def init(*, microbatches: int, policy: str = "static", restore: str = "auto") -> Job:
    """Join the job as :func:`recover.init` does, and let Nanotron find this replica's world.

    Nanotron reads the world from RANK, WORLD_SIZE and the like, which are set to the replica's.
    The device is the one that recover.init has chosen: replicas may share a host.
    """
    from nanotron.parallel import ParallelContext

    job = recover.init(microbatches=microbatches, policy=policy, restore=restore)
    ranks = job.ranks_per_replica
    local = 8 if ranks > 8 else ranks  # as Nanotron takes it to be
    os.environ |= {
        "RANK": str(job.shard),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(job.shard % local),
        "LOCAL_WORLD_SIZE": str(local),
    }
    ParallelContext.set_device = lambda _: None
    return job


def parallel_context(job: Job, **sizes: int) -> Any:
    """Return Nanotron's ParallelContext of this replica, for a script that makes its own.

    ``sizes`` are Nanotron's arguments, such as ``pipeline_parallel_size``, without the
    data-parallel one. Raises ValueError where they do not fill the replica.
    """
    from nanotron.parallel import ParallelContext

    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | sizes
    if sizes.pop("data_parallel_size", 1) != 1:
        raise ValueError("data_parallel_size must be 1: the replicas are that dimension")
    needed = 1
    for size in sizes.values():
        needed *= size
    if needed != job.ranks_per_replica:
        raise ValueError(
            f"{sizes} need {needed} ranks, but a replica has {job.ranks_per_replica}; "
            "see `recover run --ranks-per-replica`"
        )
    context = ParallelContext(data_parallel_size=1, **sizes)
    _require_one_copy(context)
    return context


def trainer(
    job: Job,
    model: nn.Module,
    accumulator: Any,
    *,
    bucket_mb: float = 25.0,
    config: Mapping[str, object] | None = None,
) -> recover.Trainer:
    """Return a trainer over the fp32 gradients of ``accumulator``, a FP32GradientAccumulator.

    From here on its buffers are the trainer's. ``model`` is Nanotron's, under DDP or not. After
    each commit the caller does what Nanotron does with a complete gradient: sum tied weights, clip,
    step the optimizer. With None for the accumulator gradients are those in ``param.grad``, summed
    over a pass in the parameters' own type.
    """
    parts = [model.module if isinstance(model, DistributedDataParallel) else model]
    holders: dict[str, Holder] | None = None
    if accumulator is not None:
        parts.append(MasterWeights(accumulator))
        holders = {name: Gradient(accumulator, name) for name in accumulator.fp32_grad_buffers}
    made = recover.Trainer(job, parts, None, bucket_mb=bucket_mb, holders=holders, config=config)
    if accumulator is not None:
        made.buckets.begin()  # binds the accumulators ...
        accumulator._contiguous_fp32_grad_buffer = torch.empty(0)  # ... and nobody reads this one
    return made


class MasterWeights(nn.Module):
    """The accumulator's fp32 parameters: state that replicas start and end with alike."""

    def __init__(self, accumulator: Any) -> None:
        super().__init__()
        for index, weight in enumerate(accumulator.parameters.values()):
            shared = nn.Parameter(weight["fp32"].detach(), requires_grad=False)
            self.register_parameter(f"master{index}", shared)


class Gradient:
    """The fp32 gradient of one parameter, where Nanotron's accumulator and its optimizer look."""

    dtype = torch.float32

    def __init__(self, accumulator: Any, name: str) -> None:
        self._accumulator, self._name = accumulator, name
        self._buffer: dict[str, Any] = accumulator.fp32_grad_buffers[name]
        self._parameter = self._buffer["half"]

    @property
    def shape(self) -> torch.Size:
        """The parameter's own."""
        return cast(torch.Size, self._parameter.shape)

    @property
    def device(self) -> torch.device:
        """The parameter's own."""
        return cast(torch.device, self._parameter.device)

    @property
    def shards(self) -> int:
        """Ranks over which Nanotron has cut the parameter."""
        cut = getattr(self._parameter, "is_sharded", False)
        return len(self._parameter.get_sharded_info().global_ranks) if cut else 1

    @property
    def description(self) -> str:
        """Name, shape and type."""
        return f"{self._name} {tuple(self.shape)} of {self.shards} {self._parameter.dtype}"

    def show(self, gradient: Tensor | None) -> None:
        """Make it Nanotron's buffer and the gradient of the fp32 parameter.

        The buffer is never nothing: Nanotron adds to it. It then stays what it was, zeros.
        """
        if gradient is not None:
            self._buffer["fp32_grad"] = gradient
        weight = self._accumulator.parameters.get(self._name)
        if weight is not None:
            master = weight["fp32"]  # of one dimension under ZeRO-1
            master.grad = None if gradient is None else gradient.view(master.shape)

    def seen(self) -> Tensor:
        """Return Nanotron's buffer."""
        return cast(Tensor, self._buffer["fp32_grad"])

    def holds(self, gradient: Tensor) -> bool:
        return False  # added to after autograd's hooks

    def watch(self, used: Callable[[], None]) -> None:
        """Call ``used`` when a backward pass has given the 16-bit parameter a gradient."""
        self._parameter.register_post_accumulate_grad_hook(lambda _: used())


class Pipeline:
    """Runs passes of any length through a pipeline engine of Nanotron's; losses stay whole.

    The gradient that a pass leaves is the sum over its microbatches, each that of its own loss.
    """

    def __init__(self, engine: Any, model: nn.Module, context: Any, accumulator: Any) -> None:
        from nanotron.parallel.pipeline_parallel.engine import AllForwardAllBackwardPipelineEngine

        self._engine, self._short = engine, AllForwardAllBackwardPipelineEngine()
        self._model, self._group, self._accumulator = model, context.pp_pg, accumulator

    def __call__(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Run forward and backward of a pass; return its losses, none off the last stage."""
        short = len(microbatches) < self._group.size() - 1  # 1F1B refuses, and has nothing to save
        engine = self._short if short else self._engine
        forward = engine.forward
        engine.forward = lambda *given, **named: _undivided(engine, forward, *given, **named)
        try:
            outputs = engine.train_batch_iter(
                model=self._model,
                pg=self._group,
                batch=iter(microbatches),
                nb_microbatches=len(microbatches),
                grad_accumulator=self._accumulator,
            )
        finally:
            del engine.forward
        losses = (output["loss"] for output in outputs)
        return [loss for loss in losses if isinstance(loss, Tensor)]


def _undivided(engine: Any, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run the forward pass of a microbatch as if it were the only one of its pass."""
    length, engine.nb_microbatches = engine.nb_microbatches, 1
    try:
        return forward(*given, **named)
    finally:
        engine.nb_microbatches = length


# --- Nanotron's own trainer ------------------------------------------------------------------


def attach(job: Job, trainer: Any, *, data: Data[Microbatch] | None = None) -> None:
    """Let ``trainer``, a DistributedTrainer, survive the loss of replicas of ``job``.

    Every step commits ``job.microbatches``, whatever ``batch_accumulation_per_replica`` says. The
    loader that ``train`` is given must yield the same on all replicas: each takes its own out of
    every ``job.replicas`` in turn. ``data`` replaces it: anything that ``Trainer.steps`` takes.
    Only the lowest surviving replica saves checkpoints.

    Raises ValueError for a configuration with data or context parallelism inside the replica.
    """
    _Attached(job, trainer, data)


class _Attached:
    """Takes the place of the trainer's engine and of the methods around it."""

    def __init__(self, job: Job, stock: Any, data: Data[Microbatch] | None) -> None:
        _require_one_copy(stock.parallel_context)
        self._job, self._stock, self._data = job, stock, data
        self._survivors = tuple(range(job.replicas))
        self._ours = trainer(job, stock.model, stock.grad_accumulator)
        engine = stock.config.parallelism.pp_engine
        self._pipeline = Pipeline(
            engine, stock.model, stock.parallel_context, stock.grad_accumulator
        )
        self._steps: Iterator[Step[Microbatch]] | None = None
        self._step: Step[Microbatch] | None = None
        self._training_step = stock.training_step
        self._post_training = stock.post_training
        self._save_checkpoint = stock.save_checkpoint
        stock.training_step = self.training_step
        stock.post_training = self.post_training
        stock.save_checkpoint = self.save_checkpoint
        stock.global_batch_size = stock.micro_batch_size * job.microbatches

    def training_step(self, dataloader: Iterator[Microbatch]) -> Any:
        """Begin a step, and run the trainer's own with this object as its engine."""
        if self._steps is None:
            stream = itertools.islice(dataloader, self._job.replica, None, self._job.replicas)
            self._steps = self._ours.steps(
                stream if self._data is None else self._data, until=self._steps_left()
            )
        self._step = next(self._steps)
        self._stock.pipeline_engine = self
        return self._training_step(dataloader=dataloader)

    def train_batch_iter(self, **_: Any) -> list[dict[str, Any]]:
        """Run the passes of a step and commit it; return its mean loss where there is one."""
        from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer

        assert self._step is not None
        tokens = self._stock.micro_batch_size * self._stock.sequence_length
        for microbatches in self._step.passes():
            self._step.ran(self._pipeline(microbatches), tokens=tokens * len(microbatches))
        record: StepRecord = self._step.commit()
        self._survivors = record.survivors
        context, last = self._stock.parallel_context, self._stock.unwrapped_model.output_pp_rank
        if context.pp_pg.rank() != last:
            return [{"loss": TensorPointer(group_rank=last)}]
        return [{"loss": torch.tensor(record.loss, device=_device(self._stock.model))}]

    def post_training(self) -> None:
        """Agree with the others on the end."""
        if self._steps is not None:
            next(self._steps, None)
        self._post_training()

    def save_checkpoint(self) -> Path:
        """Save, if this is the replica that does."""
        if self._job.replica == min(self._survivors):
            return cast(Path, self._save_checkpoint())
        stock = self._stock
        return Path(stock.config.checkpoints.checkpoints_path) / f"{stock.iteration_step}"

    def _steps_left(self) -> int:
        """Count from here: Nanotron has just set ``iteration_step`` to its first, from 1."""
        return int(self._stock.config.tokens.train_steps) - int(self._stock.iteration_step) + 1


def _require_one_copy(context: Any) -> None:
    for dimension in ("data", "context"):
        size = getattr(context, f"{dimension}_parallel_size", 1)
        if size != 1:
            raise ValueError(
                f"{dimension}-parallel size is {size}, must be 1 inside a replica: "
                "replicas are the data-parallel dimension, and Nanotron sums context-parallel "
                "gradients together with it"
            )


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
