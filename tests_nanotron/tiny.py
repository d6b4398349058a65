"""A tiny model of Nanotron's pipeline blocks, and its data; import after `on_cpu.install`."""

from collections.abc import Mapping
from typing import Any

import torch
from nanotron.models.base import NanotronModel
from nanotron.parallel.parameters import NanotronParameter
from nanotron.parallel.pipeline_parallel.block import PipelineBlock
from nanotron.parallel.pipeline_parallel.p2p import P2P
from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
from torch import Tensor, nn

from tests_nanotron.data import LAYERS, WIDTH, rows


class Layer(nn.Linear):
    """One of the layers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (ROWS, WIDTH)
        return torch.tanh(super().forward(x))


class Loss(nn.Module):
    """Mean squared error, in fp32."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.float() - y.float()).square().mean()


class Tiny(NanotronModel):  # type: ignore[misc]
    """Four layers over the pipeline's ranks, and the loss on the last."""

    def __init__(self, parallel_context: Any, tie: bool = False, **_: Any) -> None:
        super().__init__()
        self.parallel_context = parallel_context
        self.p2p = P2P(parallel_context.pp_pg, device=torch.device("cpu"))
        self.layers = nn.ModuleList([self._block(Layer, {"x"}) for _ in range(LAYERS)])
        self.loss = self._block(Loss, {"x", "y"})
        self.tie = tie

    def _block(self, builder: type[nn.Module], inputs: set[str]) -> PipelineBlock:
        return PipelineBlock(
            p2p=self.p2p,
            module_builder=builder,
            module_kwargs={},
            module_input_keys=inputs,
            module_output_keys={"x"},
        )

    def forward(self, x: Any, y: Any) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x=x)["x"]
        return {"loss": self.loss(x=x, y=y)["x"]}

    def get_block_compute_costs(self) -> dict[type[nn.Module], int]:
        return {Layer: 1}

    def get_flops_per_sec(self, *_: Any, **__: Any) -> tuple[float, float]:
        return 0.0, 0.0

    def get_embeddings_lm_head_tied_names(self) -> list[str]:
        """Tie the first weight and the last, which are on different stages."""
        ends = (0, LAYERS - 1)
        return [f"layers.{end}.pp_block.weight" for end in ends] if self.tie else []

    def init_model_randomly(self, config: Any) -> None:
        fill(self)


def fill(model: Any) -> None:
    """Give every parameter values that depend on its name alone; tied ones the same."""
    for name, parameter in model.named_parameters():
        tied = isinstance(parameter, NanotronParameter) and parameter.is_tied
        seed = parameter.get_tied_info().name if tied else name
        generator = torch.Generator().manual_seed(sum(map(ord, seed)))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


def as_nanotron_parameters(model: nn.Module) -> None:
    """Make plain parameters Nanotron's own kind, as its layers do."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, NanotronParameter):
                setattr(module, name, NanotronParameter(parameter.detach().clone()))


class Rows:
    """Microbatches by id: inputs on the first stage, targets on the last, pointers elsewhere."""

    def __init__(self, stage: int, last: int) -> None:
        self._stage, self._last = stage, last

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        x, y = rows(number)
        return {
            "x": x if self._stage == 0 else TensorPointer(group_rank=0),
            "y": y if self._stage == self._last else TensorPointer(group_rank=self._last),
        }
