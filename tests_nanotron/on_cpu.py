"""Lets Nanotron 0.4, which is written for GPUs, run on a CPU. For tests only: nothing is faster.

It names "cuda" wherever it makes a tensor, its trainer imports flash-attention whatever the model,
gloo knows no average, and the release on the package index cannot be imported at all: its logging
and its configuration import each other.
"""

import importlib
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CUDA_CALLS = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device")
_FLASH = {
    "flash_attn": ["bert_padding"],
    "flash_attn.bert_padding": [],
    "flash_attn.flash_attn_interface": ["flash_attn_varlen_func", "flash_attn_with_kvcache"],
    "flash_attn.layers": [],
    "flash_attn.layers.rotary": ["RotaryEmbedding"],
    "flash_attn.ops": [],
    "flash_attn.ops.triton": [],
    "flash_attn.ops.triton.layer_norm": ["layer_norm_fn"],
}


def install() -> None:
    """Do all of it, for the rest of the process; before anything of Nanotron is imported."""
    _ToCpu().__enter__()  # type: ignore[no-untyped-call]
    for call in _CUDA_CALLS:
        setattr(torch.cuda, call, lambda *_, **__: None)
    _break_import_cycle()
    _flash_attention()
    import nanotron.distributed as nanotron_dist

    nanotron_dist.all_reduce = _all_reduce


class _ToCpu(TorchFunctionMode):
    """Sends what asks for a CUDA device to the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        named = dict(named or {})
        if "device" in named:
            named["device"] = _device(named["device"])
        return function(*map(_device, given), **named)


def _device(value: Any) -> Any:
    named_cuda = isinstance(value, str) and value.startswith("cuda")
    if named_cuda or (isinstance(value, torch.device) and value.type == "cuda"):
        return torch.device("cpu")
    return value


def _all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **named: Any) -> Any:
    if op != dist.ReduceOp.AVG:
        return dist.all_reduce(tensor, op=op, group=group, **named)
    with torch.no_grad():
        tensor.div_(dist.get_world_size(group))
    return dist.all_reduce(tensor, group=group, **named)


def _break_import_cycle() -> None:
    """Let logging be imported first, with a stand-in for the configuration that it names."""
    try:
        importlib.import_module("nanotron.config")
        return
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == "nanotron"]:
            del sys.modules[name]
    stand_in = {name: ModuleType(name) for name in ("nanotron.config", "nanotron.config.config")}
    stand_in["nanotron.config"].__path__ = []
    stand_in["nanotron.config.config"].LoggingArgs = object  # type: ignore[attr-defined]
    sys.modules |= stand_in
    importlib.import_module("nanotron.logging")
    for name in stand_in:
        del sys.modules[name]
    importlib.import_module("nanotron.config")


def _flash_attention() -> None:
    for name, contents in _FLASH.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for each in contents:
            setattr(
                module, each, SimpleNamespace() if each.islower() and "func" not in each else _no
            )
        sys.modules[name] = module


def _no(*_: Any, **__: Any) -> Any:
    raise RuntimeError("there is no flash-attention on a CPU")
