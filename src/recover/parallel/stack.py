"""What a training stack holds on this rank: its gradients, its state, its names. Layer: parallel.

One place that tells stacks apart. A plain module, DDP, FSDP2, tensor and pipeline parts and experts
all hold their gradients in ``param.grad``, as tensors or DTensors; FSDP1 holds them flat.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from recover.parallel import fsdp1
from recover.tensors.holders import Holder, ParameterHolder


class Stack:
    """The model parts of one rank: one module, or the stages of a pipeline that it runs."""

    def __init__(self, model: nn.Module | Sequence[nn.Module]) -> None:
        self.parts = [model] if isinstance(model, nn.Module) else list(model)
        if not self.parts:
            raise ValueError("there is no model: the list of its parts is empty")

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model, where it is one under DDP."""
        only = self.parts[0]
        return only if isinstance(only, DistributedDataParallel) else None

    def keep_inside(self, cross_replica: Callable[[], dist.ProcessGroup]) -> None:
        """Switch off what FSDP1 itself would reduce over other replicas."""
        for part in self.parts:
            if any(isinstance(module, FullyShardedDataParallel) for module in part.modules()):
                fsdp1.keep_inside(part, cross_replica())

    def holders(self) -> dict[str, Holder]:
        """Return the holder of every gradient of this rank by the name of what it belongs to.

        The names are the same on all ranks that hold a part of the same thing.
        """
        found: dict[str, Holder] = {}
        for part in self.parts:
            flat = {id(m): name for name, m in part.named_modules()}
            for module in fsdp1.wrapped(part):
                found[f"{flat[id(module)]}.flat"] = fsdp1.FlatHolder(module)
            loose = {id(p) for p in fsdp1.loose_parameters(part)}
            for name, parameter in _last_ready_first(part):
                if parameter.requires_grad and id(parameter) in loose:
                    _require_new(name, parameter, found)
                    found[name] = ParameterHolder(parameter)
        return found

    def state(self) -> Iterator[Tensor]:
        """Yield what must be equal on all replicas: parameters, then buffers."""
        for part in self.parts:
            yield from part.parameters()
        for part in self.parts:
            yield from part.buffers()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of this rank once, in order."""
        return iter(dict.fromkeys(p for part in self.parts for p in part.parameters()))


def _last_ready_first(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters; first those that FSDP2 reduces last, the outermost module's."""
    inner = {
        id(parameter)
        for module in part.modules()
        if isinstance(module, FSDPModule) and module is not part
        for parameter in module.parameters()
    }
    return sorted(part.named_parameters(), key=lambda named: id(named[1]) in inner)


def _require_new(name: str, parameter: nn.Parameter, found: Mapping[str, Holder]) -> None:
    if name in found:
        raise ValueError(
            f"two parts of the model have a parameter {name!r}, of shape {tuple(parameter.shape)} "
            "and other; the parts must name their parameters as the whole model does"
        )
