"""Whole tensors of a replica, put together from the shards of its ranks by any stack's rules."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

Named = dict[str, Tensor | None]


def whole(model: nn.Module, *, gradients: bool) -> Named:
    """Return parameters or their gradients by name; called by all ranks of a replica."""
    if isinstance(model, FSDP):
        return dict(_flat(model, gradients=gradients))
    found: Named = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        found[name] = None if tensor is None else tensor.clone()
    return found


def _flat(model: FSDP, *, gradients: bool) -> Iterator[tuple[str, Tensor | None]]:
    names = {id(module): name for name, module in model.named_modules()}
    for module in FSDP.fsdp_modules(model):
        handle: Any = module._handle
        if handle is None:
            continue
        flat = handle.flat_param
        prefix = names[id(module)].replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
        local = flat.grad if gradients else flat.detach()
        pieces = [None] * len(flat._fqns)
        if local is not None:
            together = torch.empty(local.numel() * handle.world_size, dtype=local.dtype)
            dist.all_gather_into_tensor(together, local.contiguous(), group=handle.process_group)
            pieces = _split(together, flat)
        for name, piece in zip(flat._fqns, pieces, strict=True):
            yield f"{prefix}.{name}".strip("."), piece


def _split(together: Tensor, flat: Any) -> list[Any]:
    """Cut a flat parameter into those that it is made of, leaving out what fills gaps."""
    pieces, start, shapes = [], 0, iter(flat._shapes)
    for numel, fills in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not fills:
            pieces.append(together[start : start + numel].view(next(shapes)).clone())
        start += numel
    return pieces
