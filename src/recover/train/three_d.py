"""The reference decoder as one replica of pipeline x expert x tensor parallel ranks. Layer: train.

    replica = build_replica(config, ReplicaShape(pp=2, tp=2), sequences=8, seed=0)
    trainer = recover.Trainer(job, replica.parts, optimizer, tied=replica.tied)
    for step in trainer.steps(data, until=N):
        for microbatches in step.passes():
            step.ran(replica.run(microbatches), tokens=...)
        step.commit()

Every rank builds the whole model from the seed and keeps its part: the same weights as one process
has, whatever the shape. Paper: 4.4, Path 2. How each axis divides it:

- **pp** layers: each stage is a run of blocks; the first has the embedding, the last the norm and
  the head. A tied head becomes a second parameter with equal values, and the two a `Tied` pair.
- **ep** experts and sequences: a rank works on its slice of each microbatch, so its gradients of
  everything but the experts are parts of a sum: `Tied` over ep. Experts are DTensors Shard(0).
- **tp** heads and feed-forward width, as DTensors. The rest is replicated and computed alike on all
  tp ranks; with ``sequence_parallel`` the norms work on a slice of the positions in between.

Axes of tensors: B sequences of this rank's slice of a microbatch, S positions (or its slice of
them, where it is sequence parallel), D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from recover.parallel.pipeline import Pipeline
from recover.parallel.shape import ReplicaShape
from recover.parallel.tied import Tied
from recover.train.model import Decoder, ModelConfig, build, next_token_losses
from recover.train.moe import MixtureOfExperts


class DecoderPart(nn.Module):
    """Some consecutive layers of a decoder: tokens or activations in, activations or logits out.

    Takes the modules of ``model``; parameters keep the names that they have in it.
    """

    def __init__(self, model: Decoder, layers: range, *, recompute: bool) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == len(model.blocks)
        self.recompute = recompute
        self.embedding = model.embedding if first else None
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        self.norm = model.norm if last else None
        self.output = model.output if last else None
        self._shares_weight = model.output is None and first != last
        if self._shares_weight and last:
            vocab, dim = model.embedding.weight.shape
            self.output = nn.Linear(dim, vocab, bias=False)
            self.output.weight = nn.Parameter(model.embedding.weight.detach().clone())

    @property
    def split_tie(self) -> nn.Parameter | None:
        """Return the weight that is embedding here and head on another stage, or the reverse."""
        ends = [module.weight for module in (self.embedding, self.output) if module is not None]
        return cast(nn.Parameter, ends[0]) if self._shares_weight else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)  # (B, S, D)
        for block in self.blocks.values():
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        if self.norm is None:
            return x  # (B, S, D)
        weight = (self.output or self.embedding).weight  # type: ignore[union-attr]  # (V, D)
        return F.linear(self.norm(x), weight).float()  # (B, S, V)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What `build_replica` makes: this rank's share of a replica, ready to train."""

    config: ModelConfig
    shape: ReplicaShape
    mesh: DeviceMesh
    sequences: int
    """Sequences in a microbatch of the whole replica."""
    parts: list[DecoderPart]
    tied: list[Tied]
    pipeline: Pipeline
    device: torch.device

    def slice(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return this ep rank's (inputs, targets), (B, S) each, of a microbatch of the replica.

        tokens: (sequences, config.sequence + 1) int64. Raises ValueError for another shape.
        """
        expected = (self.sequences, self.config.sequence + 1)
        if tuple(tokens.shape) != expected:
            raise ValueError(f"tokens must have shape {expected}, got {tuple(tokens.shape)}")
        mine = tokens.chunk(self.shape.ep)[self.mesh["ep"].get_local_rank()].to(self.device)
        return mine[:, :-1], mine[:, 1:]

    def run(self, microbatches: Sequence[Tensor]) -> list[Tensor]:
        """Run forward and backward of a pass; return its losses on the last pipeline rank, else [].

        Adds to each ``param.grad`` the sum over microbatches of the mean loss's gradient (of this
        ep rank's part of it, for what is tied).
        """
        slices = [self.slice(tokens) for tokens in microbatches]
        return self.pipeline.run([x for x, _ in slices], [target for _, target in slices])

    def copies(self, parameter: nn.Parameter) -> int:
        """Return how many ranks of the replica hold this parameter, or this very shard of it.

        For a norm over the replica: the squares of all ranks, each divided by its copies, add up to
        the whole model's.
        """
        sharded: set[str] = set()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            placed = zip(names, parameter.placements, strict=True)
            sharded = {name for name, placement in placed if placement.is_shard()}
        alike = (self.shape.ep if "ep" not in sharded else 1) * (
            self.shape.tp if "tp" not in sharded else 1
        )
        return alike * (2 if any(parameter is part.split_tie for part in self.parts) else 1)


def build_replica(
    config: ModelConfig,
    shape: ReplicaShape,
    *,
    sequences: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    schedule: str = "gpipe",
    sequence_parallel: bool = False,
    recompute: bool = False,
    compiled: bool = False,
    device: torch.device | str = "cpu",
) -> Replica:
    """Build this rank's share of a replica in the default group, which is the replica's own world.

    ``sequences`` of ``config.sequence`` tokens make a microbatch of the replica. ``schedule`` is
    "gpipe", "1f1b" or "interleaved" (two stages per rank). ``recompute`` keeps no activations
    inside blocks, ``compiled`` runs them through torch.compile. Freeze parameters afterwards, on
    all ranks alike. Collective over the replica. Raises ValueError where sizes do not fit.
    """
    device = torch.device(device)
    _require_fit(config, shape, sequences, sequence_parallel=sequence_parallel)
    mesh = shape.mesh(device.type)
    looped = schedule == "interleaved" and shape.pp > 1
    stages = split_layers(config.layers, shape.pp * (2 if looped else 1))
    model = build(config, seed=seed, dtype=dtype).to(device)
    mine = range(mesh["pp"].get_local_rank(), len(stages), shape.pp)
    parts = [DecoderPart(model, stages[stage], recompute=recompute) for stage in mine]
    for part in parts:
        _parallelize(part, mesh, sequence_parallel=sequence_parallel)
        for block in part.blocks.values() if compiled else ():
            block.compile()
    rows = sequences // shape.ep
    positions = config.sequence // (shape.tp if sequence_parallel else 1)
    tokens = torch.empty(rows, config.sequence, dtype=torch.int64, device="meta")
    stream = torch.empty(rows, positions, config.dim, dtype=dtype, device="meta")
    logits = torch.empty(rows, config.sequence, config.vocab, device="meta")
    pipeline = Pipeline(
        [
            PipelineStage(
                part,
                stage,
                len(stages),
                device,
                input_args=tokens if stage == 0 else stream.requires_grad_(),
                output_args=(logits if stage == len(stages) - 1 else stream).requires_grad_(),
                group=mesh["pp"].get_group(),
            )
            for stage, part in zip(mine, parts, strict=True)
        ],
        mean_loss,
        schedule,
        weight=1 / shape.ep,
    )
    return Replica(
        config=config,
        shape=shape,
        mesh=mesh,
        sequences=sequences,
        parts=parts,
        tied=_tied(parts, shape, mesh),
        pipeline=pipeline,
        device=device,
    )


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of targets (B, S) under logits (B, S, V), a scalar."""
    return next_token_losses(logits, targets).mean()


def split_layers(layers: int, stages: int) -> list[range]:
    """Share consecutive layers out over stages, the earlier ones getting what is left over."""
    if layers < stages:
        raise ValueError(f"layers={layers} cannot be shared out over {stages} pipeline stages")
    size, larger = divmod(layers, stages)
    starts = [stage * size + min(stage, larger) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _require_fit(
    config: ModelConfig, shape: ReplicaShape, sequences: int, *, sequence_parallel: bool
) -> None:
    if shape.ep > 1 and not config.experts:
        raise ValueError(f"ep={shape.ep} needs a model with experts, got experts=0")
    divided = [
        ("sequences", sequences, "ep", shape.ep),
        ("experts", config.experts, "ep", shape.ep),
        ("heads", config.heads, "tp", shape.tp),
        ("kv_heads", config.kv_heads, "tp", shape.tp),
    ]
    if not config.experts:
        divided.append(("hidden", config.hidden, "tp", shape.tp))
    if sequence_parallel:
        divided.append(("sequence", config.sequence, "tp", shape.tp))
    for name, value, axis, ranks in divided:
        if value % ranks:
            raise ValueError(f"{name}={value} is not a multiple of {axis}={ranks}")


def _parallelize(part: DecoderPart, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Turn a part's experts and, with more than one tp rank, its projections into shards."""
    for module in part.modules():
        if isinstance(module, MixtureOfExperts) and mesh["ep"].size() > 1:
            module.shard(mesh["ep"])
    tp = mesh["tp"]
    if tp.size() == 1:
        return
    for block in part.blocks.values():
        feed_forward = cast(nn.Module, block.feed_forward)
        plan = _plan(feed_forward, sequence_parallel=sequence_parallel)
        parallelize_module(block, tp, plan)
    if sequence_parallel and part.embedding is not None:
        scatter = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        parallelize_module(part.embedding, tp, scatter)
    if sequence_parallel and part.norm is not None:
        gather = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(part.norm, tp, gather)
    for parameter in part.parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            parameter.register_hook(_as_placed(parameter))  # type: ignore[no-untyped-call]


def _plan(feed_forward: nn.Module, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Say how one block is divided over tp; ``stream``: how the residual stream is."""
    stream = Shard(1) if sequence_parallel else Replicate()  # of (B, S, D)
    whole = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {"attention": whole}
    plan |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan["attention.output"] = RowwiseParallel(output_layouts=stream)
    if not isinstance(feed_forward, MixtureOfExperts):
        plan |= {"feed_forward": whole}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan["feed_forward.output"] = RowwiseParallel(output_layouts=stream)
    elif sequence_parallel:  # experts are not divided over tp: all tp ranks do the same work
        plan["feed_forward"] = PrepareModuleInputOutput(
            input_layouts=stream,
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=stream,
        )
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("attention_norm", "feed_forward_norm")}
    return plan


def _as_placed(parameter: DTensor) -> Callable[[DTensor], DTensor]:
    """Return a hook that gives gradients their parameter's placements.

    That of a replicated norm comes out as each tp rank's part of a sum; here it is summed.
    """
    placements = parameter.placements
    return lambda gradient: gradient.redistribute(placements=placements)


def _tied(parts: list[DecoderPart], shape: ReplicaShape, mesh: DeviceMesh) -> list[Tied]:
    """Say which gradients are sums over ranks; every rank creates all the groups, in one order."""
    tied = []
    if shape.ep > 1:
        experts = [
            parameter
            for part in parts
            for module in part.modules()
            if isinstance(module, MixtureOfExperts)
            for parameter in module.expert_parameters()
        ]
        held = {id(parameter) for parameter in experts}
        dense = [p for part in parts for p in part.parameters() if id(p) not in held]
        tied.append(Tied(dense, mesh["ep"].get_group()))
    for ends in shape.pipeline_ends() if shape.pp > 1 else ():
        group = dist.new_group(list(ends))
        weights = [part.split_tie for part in parts if part.split_tie is not None]
        if dist.get_rank() in ends and weights:
            tied.append(Tied(weights, group))
    return tied
