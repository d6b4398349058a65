"""torchtitan inside each replica. Layer: adapters. Paper: Appendix C.

    job = recover.init(microbatches=32)
    trainer = torchtitan.trainer(job, config)         # instead of config.build()
    trainer.train()

Theory of operation
-------------------
A replica is a whole torchtitan job: its meshes (FSDP2, tensor, pipeline, context) lie in the
replica's own world. One of our microbatches is one of torchtitan's gradient accumulation steps: a
``local_batch_size`` on each of the replica's data-parallel ranks, split further by a pipeline.

torchtitan's ``train_step`` is left as it is and believes in one accumulation step. Its one call of
``forward_backward_step`` runs the share of this replica through torchtitan's own forward and
backward, reduces, and commits: what ``train_step`` then finds in ``param.grad`` is the gradient of
the iteration. It clips, steps optimizers and schedulers and logs as ever.

**Denominators.** torchtitan divides a sum of token losses by the valid tokens of the step, which
nobody knows before a failure has been repaired. Every microbatch is divided by N instead, its
number of positions, valid or not: a constant. After the commit the gradient is that sum over
N x B, and one multiplication by N x B / V makes it torchtitan's, V being the valid tokens that were
committed (counted in the same reduction). So it is the failure-free one, padded data or not.

**Data.** ``exact``: every replica reads the same stream, torchtitan's for its own ranks, and item i
of it is microbatch i; it skips those that are others'. What a dead replica had is run by another,
and the loader's state in a checkpoint holds for all (but for the few microbatches that spares have
read in advance, which a restart may skip). ``stream``: the stream is cut over the ranks of all
replicas, and a dead replica's part drops out; nothing is read in vain, and after a restart from a
checkpoint only the replica that saved it goes on where it was.
"""

import dataclasses
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import recover
from recover.errors import RecoverError
from recover.records import StepRecord
from recover.train.job import Job
from recover.train.source import Data
from recover.train.step import Step

Batch = tuple[dict[str, Any], Tensor]
"""Inputs by name, and labels."""
Group = list[Batch]
"""One accumulation step: one batch, or those that a pipeline runs together."""

_DAY_S = 86_400
_DATA = ("exact", "stream")


def trainer(job: Job, config: Any, *, data: str = "exact", bucket_mb: float = 25.0) -> Any:
    """Build the trainer that ``config`` describes so that it survives the loss of replicas.

    It is torchtitan's own (or the subclass that the configuration belongs to); ``train`` runs it.
    ``global_batch_size`` follows from ``job.microbatches``. The lowest surviving replica alone
    saves checkpoints; TensorBoard folders are each replica's own.

    Raises ValueError for a configuration that cannot be carried.
    """
    if data not in _DATA:
        raise ValueError(f"data must be one of {', '.join(_DATA)}, got {data!r}")
    _require_possible(config)
    on_gpu = torch.cuda.is_available()
    os.environ |= {  # the replica's world, and the device that recover.init has chosen
        "RANK": str(job.shard),
        "WORLD_SIZE": str(job.ranks_per_replica),
        "LOCAL_RANK": str(torch.cuda.current_device() if on_gpu else job.shard),
    }
    # torchtitan does so where it makes the default group itself: recomputation needs its meshes.
    torch.autograd.set_multithreading_enabled(False)
    owner = type(config)._owner
    surviving = type(f"Surviving{owner.__name__}", (Surviving, owner), {})
    made = surviving(_adapted(job, config, stream=data == "stream"))
    made.survive(job, exact=data == "exact", bucket_mb=bucket_mb)
    return made


class Surviving:
    """What a torchtitan Trainer does differently; mixed in before its class."""

    # torchtitan's
    checkpointer: Any
    config: Any
    dataloader: Any
    device: torch.device
    metrics_processor: Any
    model_parts: list[torch.nn.Module]
    ntokens_seen: int
    num_pipeline_parallel_microbatches: int
    parallel_dims: Any
    step: int

    def survive(self, job: Job, *, exact: bool, bucket_mb: float) -> None:
        """Join the constructed trainer to the job."""
        self._job, self._exact = job, exact
        self._ours = recover.Trainer(job, self.model_parts, None, bucket_mb=bucket_mb)
        self._steps: Iterator[Step[Group]] | None = None
        self._window: Window | None = None
        self._survivors: tuple[int, ...] = tuple(range(job.replicas))
        self._group_size = int(self.num_pipeline_parallel_microbatches)
        self._positions = int(  # N
            self.config.training.local_batch_size
            * self.config.training.seq_len
            * self._size("batch")
        )
        self.gradient_accumulation_steps = 1  # as train_step believes
        save = self.checkpointer.save

        def save_once(*given: Any, **named: Any) -> None:
            if job.replica == min(self._survivors):
                save(*given, **named)

        self.checkpointer.save = save_once

    def train(self) -> None:
        """Train as torchtitan does, then agree with the others on the end."""
        super().train()  # type: ignore[misc]
        if self._steps is not None:
            next(self._steps, None)

    def batch_generator(self, data_iterable: Any) -> Iterator[Batch]:
        """Yield torchtitan's batches; they are counted when they run."""
        for batch in super().batch_generator(data_iterable):  # type: ignore[misc]
            self.metrics_processor.ntokens_since_last_log -= batch[1].numel()
            yield batch

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run torchtitan's step; what it draws itself is a placeholder."""
        if self._steps is None:  # a checkpoint has been loaded by now
            stream = _groups(data_iterator, self._group_size)
            self._window = Window(stream) if self._exact else None
            source: Data[Group] = stream if self._window is None else self._window
            left = int(self.config.training.steps) - self.step + 1
            self._steps = self._ours.steps(source, until=left)
        label = torch.zeros(1, 1, dtype=torch.int64)
        placeholders = [({"input": label}, label)] * self._group_size
        super().train_step(iter(placeholders))  # type: ignore[misc]

    def forward_backward_step(self, **_: Any) -> Tensor:
        """Run, reduce and commit an iteration; return this rank's part of its mean loss."""
        assert self._steps is not None
        step = next(self._steps)
        seen = self.ntokens_seen
        for groups in step.passes():
            losses = [self._run(group) for group in groups]
            step.ran(
                [loss for loss in losses if loss is not None], tokens=self._valid_tokens(groups)
            )
        record = step.commit()
        positions = self._positions * self._job.microbatches
        if record.tokens != positions:
            self._scale_gradients(positions / max(1, record.tokens))
        self._committed(record)
        parts = self._size("loss")
        self.ntokens_seen = seen + positions // parts
        if not getattr(self, "pp_has_last_stage", True):
            return torch.tensor([-1.0], device=self.device)  # torchtitan's for "not here"
        loss = record.loss * positions / max(1, record.tokens) / parts
        return torch.tensor(loss, device=self.device)

    def _run(self, group: Group) -> Tensor | None:
        """Run forward and backward of a microbatch; return its loss, where this rank has one."""
        inputs, labels = [], []
        for given, target in group:
            inputs.append(
                {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in given.items()}
            )
            labels.append(target.to(self.device))
            self.metrics_processor.ntokens_since_last_log += target.numel()
        pipeline = bool(self.parallel_dims.pp_enabled)
        loss: Tensor = super().forward_backward_step(  # type: ignore[misc]
            input_dict=inputs if pipeline else inputs[0],
            labels=labels if pipeline else labels[0],
            global_valid_tokens=torch.tensor(self._positions, device=self.device),
        )
        if not getattr(self, "pp_has_last_stage", True):
            return None
        # torchtitan's losses add up to the mean over the ranks that share a microbatch; ours are
        # averaged over them.
        return loss.detach() * self._size("loss")

    def _valid_tokens(self, groups: Sequence[Group]) -> int:
        """Return the number of tokens that count, on all ranks that share these microbatches."""
        from torchtitan.components.loss import IGNORE_INDEX
        from torchtitan.distributed import utils

        own = sum(int((labels != IGNORE_INDEX).sum()) for group in groups for _, labels in group)
        if self._size("batch") == 1:
            return own
        mesh = self.parallel_dims.get_mesh("batch")
        total: float = utils.dist_sum(torch.tensor(own, device=self.device), mesh)
        return round(total)

    def _scale_gradients(self, factor: float) -> None:
        for part in self.model_parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _committed(self, record: StepRecord) -> None:
        self._survivors = record.survivors
        if self._window is not None:
            self._window.committed(i for ids in record.ids.values() for i in ids)

    def _size(self, mesh: str) -> int:
        """Return the number of ranks that share a microbatch's rows, or with "loss" its tokens."""
        dims = self.parallel_dims
        rows = int(dims.dp_replicate) * int(dims.dp_shard)
        return rows * int(dims.cp) if mesh == "loss" else rows


class Window:
    """Item i of a stream is microbatch i; holds from the oldest that may be asked for again.

    ``committed`` must be told of every id once, those that ran elsewhere included: what a dead
    replica had may be asked for steps later.
    """

    def __init__(self, stream: Iterator[Group]) -> None:
        self._stream, self._first = stream, 0
        self._held: deque[Group] = deque()
        self._done: set[int] = set()

    def __getitem__(self, microbatch_id: int) -> Group:
        assert microbatch_id >= self._first, f"microbatch {microbatch_id} is committed"
        while self._first + len(self._held) <= microbatch_id:
            self._held.append(next(self._stream))
        return self._held[microbatch_id - self._first]

    def committed(self, ids: Iterable[int]) -> None:
        """Let go of all that is committed up to the first that is not, read or not."""
        self._done.update(ids)
        while self._first in self._done:
            self._done.remove(self._first)
            self._held.popleft() if self._held else next(self._stream)
            self._first += 1


def _groups(batches: Iterator[Batch], size: int) -> Iterator[Group]:
    from torchtitan.components.dataloader import DataloaderExhaustedError

    while True:  # ends with an error: a step cannot be given up once others count on it
        try:
            group = [next(batches) for _ in range(size)]
        except DataloaderExhaustedError:
            raise RecoverError(
                "torchtitan's dataloader ran out of data; it must be endless (infinite=True)"
            ) from None
        yield group


def _require_possible(config: Any) -> None:
    if not config.training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs is False, must be True: gradients change their place "
            "between the microbatches of an iteration and its end"
        )
    if config.model_spec.post_optimizer_build_fn is not None and _balances(config):
        raise ValueError(
            f"{config.model_spec.name} balances its experts' load by counts of one replica, so "
            "replicas would grow apart; set load_balance_coeff to None"
        )


def _balances(config: Any) -> bool:
    from torchtitan.models.common.moe import MoE

    found = config.model_spec.model.traverse(MoE.Config)
    return any(moe.load_balance_coeff is not None for _, moe, _, _ in found)


def _adapted(job: Job, config: Any, *, stream: bool) -> Any:
    """Return the configuration as it holds inside a replica."""
    from torchtitan.distributed import ParallelDims

    dims = ParallelDims.from_config(config.parallelism, job.ranks_per_replica)
    rows = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    asked, batch = config.training.global_batch_size, rows * job.microbatches
    if asked > 0 and asked != batch:
        raise ValueError(
            f"training.global_batch_size is {asked}, but {job.microbatches} microbatches of "
            f"{rows} sequences are {batch}; leave it out or change recover.init(microbatches=...)"
        )
    folder = f"{config.metrics.save_tb_folder}/replica-{job.replica}"
    changes = {
        "training": dataclasses.replace(config.training, global_batch_size=batch),
        "metrics": dataclasses.replace(config.metrics, save_tb_folder=folder),
        # Nobody but the launcher decides that somebody hangs: a repair may take its time.
        "comm": dataclasses.replace(config.comm, train_timeout_seconds=_DAY_S),
    }
    if stream:
        changes["dataloader"] = _cut(config.dataloader, job)
    return dataclasses.replace(config, **changes)


def _cut(loader: Any, job: Job) -> Any:
    """Return the loader's configuration so that it builds this replica's part of the stream."""
    kind = type(loader)

    def build(self: Any, *, dp_world_size: int, dp_rank: int, **rest: Any) -> Any:
        return kind.build(
            self,
            dp_world_size=dp_world_size * job.replicas,
            dp_rank=job.replica * dp_world_size + dp_rank,
            **rest,
        )

    part = type(kind.__name__, (kind,), {"__slots__": (), "build": build})
    values = {f.name: getattr(loader, f.name) for f in dataclasses.fields(loader) if f.init}
    return part(**values)
