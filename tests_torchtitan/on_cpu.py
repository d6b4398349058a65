"""Lets torchtitan 0.3 run on a CPU over gloo; import it before torchtitan. Only for tests.

Replaced: the device that torch reports, what torch.cpu lacks of a device module, attention kernels
that need a GPU, barriers that name devices, and a reduction that gloo does not have.
"""

import collections
import types
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.set_num_threads(1)

_LACKING: dict[str, Any] = {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34),
    "memory_stats": lambda *_: collections.defaultdict(int),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
}
for _name, _function in _LACKING.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _function)

_divide = FSDPModule.set_gradient_divide_factor


def _divide_by_summing(self: FSDPModule, factor: float) -> None:
    self.set_force_sum_reduction_for_comms(True)
    _divide(self, factor)


FSDPModule.set_gradient_divide_factor = _divide_by_summing  # type: ignore[method-assign]

_barrier = dist.barrier


def _barrier_of_nobody(*_: Any, **__: Any) -> None:
    _barrier()


dist.barrier = _barrier_of_nobody

import torchtitan.models.llama3 as llama3  # noqa: E402  (it asks for the device when imported)
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402

llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
