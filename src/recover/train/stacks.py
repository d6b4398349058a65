"""The reference decoder as one replica, by each way of making one of several ranks. Layer: train.

What is stock torch here is what a user would write: a wrapper around the decoder, over the default
group, which is the replica's own world. Only two groups are ReCoVer's: DDP's, and the second one
of FSDP1's ``HYBRID_SHARD``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from recover.parallel.shape import ReplicaShape
from recover.parallel.tied import Tied
from recover.train.config import SHARDED, TrainConfig
from recover.train.job import Job
from recover.train.model import Block, Decoder, build, parameter_count, preset
from recover.train.optim import matrix_names
from recover.train.three_d import build_replica


@dataclass(frozen=True, slots=True)
class ReferenceReplica:
    """This rank's part of the reference model."""

    parts: Sequence[nn.Module]
    parameters: int
    """Parameters of the whole model."""
    matrices: frozenset[str]
    """Names of those that decay."""
    loss: Callable[[Tensor], Tensor]
    """The loss of this rank's part of a microbatch of the replica."""
    pipeline: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
    """Runs forward and backward of a pass; where there is one, ``loss`` is not used."""
    tied: Sequence[Tied] = field(default=())

    @property
    def module(self) -> nn.Module:
        """All parts as one module."""
        return self.parts[0] if len(self.parts) == 1 else nn.ModuleList(self.parts)


def make_replica(config: TrainConfig, job: Job) -> ReferenceReplica:
    """Build the model that ``config`` describes and make it parallel; collective in the replica.

    Raises ValueError where the model does not divide by the shape.
    """
    shape = preset(config.preset)
    # FSDP casts for the passes by itself and keeps its shards in fp32.
    dtype = torch.float32 if config.parallel in SHARDED else getattr(torch, config.dtype)
    with torch.device("meta"):  # names and sizes of the whole, without its memory
        whole = Decoder(shape)
    matrices, parameters = matrix_names(whole), parameter_count(whole)
    if config.parallel == "3d":
        replica = build_replica(
            shape,
            ReplicaShape(pp=config.pp, ep=config.ep, tp=config.tp),
            sequences=config.sequences,
            seed=config.seed,
            dtype=dtype,
            schedule=config.schedule,
            sequence_parallel=config.sequence_parallel,
            recompute=config.recompute,
            compiled=config.compiled,
        )
        return ReferenceReplica(
            replica.parts,
            parameters,
            matrices | {"output.weight"},  # the second half of a tie that is split over stages
            loss=_no_loss,
            pipeline=replica.run,
            tied=replica.tied,
        )
    decoder = build(shape, seed=config.seed, dtype=dtype)
    model = _wrapped(_prepared(decoder, config), config, job)

    def loss(microbatch: Tensor) -> Tensor:  # (sequences, sequence + 1) int64
        own = microbatch.chunk(job.ranks_per_replica)[job.shard]
        found: Tensor = model(own)
        return found

    return ReferenceReplica([model], parameters, matrices, loss)


def _prepared(decoder: Decoder, config: TrainConfig) -> Decoder:
    for block in decoder.blocks if config.compiled else ():
        block.compile()
    if config.recompute:
        apply_activation_checkpointing(decoder, check_fn=lambda m: isinstance(m, Block))
    return decoder


def _wrapped(decoder: Decoder, config: TrainConfig, job: Job) -> nn.Module:
    narrow = torch.bfloat16 if config.dtype == "bfloat16" else None
    match config.parallel:
        case "ddp":
            return DistributedDataParallel(decoder, process_group=job.process_group)
        case "fsdp2":
            mesh = init_device_mesh("cpu", (job.ranks_per_replica,))
            policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
            for block in decoder.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(decoder, mesh=mesh, mp_policy=policy)
            return decoder
        case "fsdp1" | "hybrid":
            hybrid, own = config.parallel == "hybrid", dist.group.WORLD
            assert own is not None, "init() opened the replica's world"
            return FSDP(
                decoder,
                process_group=(own, job.process_group) if hybrid else own,
                sharding_strategy=(
                    ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
                ),
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                mixed_precision=MixedPrecision(param_dtype=narrow, reduce_dtype=torch.float32),
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )
        case _:
            return decoder


def _no_loss(_: Tensor) -> Tensor:
    raise AssertionError("a pipeline runs whole passes")
