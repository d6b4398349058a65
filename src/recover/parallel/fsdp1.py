"""Torch's FullyShardedDataParallel (FSDP1) inside a replica: Path 3 of Appendix C. Layer: parallel.

FSDP1 keeps the parameters of a wrapped module flat, and this rank's shard of their gradient with
them. Every microbatch's reduce-scatter runs inside the replica and adds to that shard, which is the
accumulator; the shard is what this rank reduces with the same shard of other replicas.

``HYBRID_SHARD`` would reduce over the replicas as well, in every backward pass and without knowing
of the shares. That reduction is put on a group of this rank alone, and FSDP's own division covers
the shard group only, so that the gradient of a microbatch is the mean over the replica's ranks.

FSDP1 offers no public way to its shards; what is used of it is in this file.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class FlatHolder:
    """This rank's shard of the gradient of one wrapped module's parameters."""

    def __init__(self, module: FSDP) -> None:
        handle: Any = module._handle
        self._handle, self._flat = handle, handle.flat_param
        self._shards = int(handle.world_size) if handle.uses_sharded_strategy else 1

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self._flat.shape
        return shape

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._flat.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._flat.device
        return device

    @property
    def shards(self) -> int:
        return self._shards

    @property
    def description(self) -> str:
        shapes = [tuple(shape) for shape in self._flat._shapes]
        return f"{tuple(self.shape)} of {shapes} in {self._shards} shards, {self.dtype}"

    def show(self, gradient: Tensor | None) -> None:
        self._flat.grad = gradient
        if self._handle._use_orig_params and self._handle.uses_sharded_strategy:
            self._handle._use_sharded_grad_views()

    def seen(self) -> Tensor | None:
        gradient: Tensor | None = self._flat.grad
        return gradient

    def holds(self, gradient: Tensor) -> bool:
        return False  # not before the end of the pass

    def watch(self, used: Callable[[], None]) -> None:
        # The hook runs while the gradient is still whole; it is sharded by the end of the pass.
        self._flat.register_post_accumulate_grad_hook(lambda _: used())


def wrapped(model: nn.Module) -> list[FSDP]:
    """Return the modules that FSDP1 wraps and that hold parameters which are trained."""
    modules = FSDP.fsdp_modules(model)
    return [m for m in modules if m._handle is not None and m._handle.flat_param.requires_grad]


def loose_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that FSDP1 leaves alone."""
    handles: Iterable[Any] = [m._handle for m in FSDP.fsdp_modules(model) if m._handle is not None]
    flat = {id(handle.flat_param) for handle in handles}
    for handle in handles:
        flat.update(map(id, handle.flat_param._params or ()))
        flat.update(map(id, handle.flat_param._shared_params or ()))
    return (p for p in model.parameters() if id(p) not in flat)


def keep_inside(model: nn.Module, cross_replica: dist.ProcessGroup) -> None:
    """Leave the reduction over ``cross_replica`` to ReCoVer.

    Raises ValueError for a model that shards over it: a shard would be lost with its replica.
    """
    modules = FSDP.fsdp_modules(model)
    alone: dist.ProcessGroup | None = None
    for module in modules:
        state: Any = module
        if state.process_group is cross_replica:
            raise ValueError(
                "FullyShardedDataParallel shards over job.process_group, which spans replicas; "
                "shard inside the replica and pass job.process_group as the second group of "
                "HYBRID_SHARD"
            )
        if module.sharding_strategy in _HYBRID and state._inter_node_pg is cross_replica:
            alone = alone or dist.new_group([dist.get_rank()], use_local_synchronization=True)
            state._inter_node_pg = alone
            state._gradient_predivide_factor = 1.0
            state._gradient_postdivide_factor = float(state.process_group.size())
