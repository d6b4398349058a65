"""A tiny torchtitan job: its llama3 debug model cut down, and data that is made up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests_torchtitan import on_cpu  # noqa: F401

# isort: split
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

SEQUENCE = 32
VOCABULARY = 2048


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Stands where the data is tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Has no settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Sequences(BaseDataLoader):  # type: ignore[misc]
    """Endless sequences that can be learned; item k of one rank is item k x ranks + rank of all."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        padded: bool = False
        """Whether sequence k of a batch ends k % 3 x 5 tokens early."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self._padded, self._ranks, self._rank = config.padded, dp_world_size, dp_rank
        self._shape = local_batch_size, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        number = self._rank
        while True:  # ends with the reader
            rows = torch.Generator().manual_seed(number)
            first = torch.randint(0, 64, (self._shape[0], 1), generator=rows)
            tokens = (first + 3 * torch.arange(self._shape[1] + 1)) % 64  # (row, position)
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            if self._padded:
                labels[:, self._shape[1] - number % 3 * 5 :] = IGNORE_INDEX
            positions = torch.arange(self._shape[1]).repeat(self._shape[0], 1)
            yield {"input": inputs, "positions": positions}, labels
            number += self._ranks

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def config(*, steps: int, rows: int = 2, padded: bool = False, tp: int = 1, pp: int = 1) -> Any:
    """Return torchtitan's configuration; what is not tensor or pipeline parallel is FSDP."""
    made = llama3_debugmodel_ce_loss()
    model = made.model_spec.model
    model.layers = model.layers[:2]
    made.training.steps, made.training.local_batch_size = steps, rows
    made.training.seq_len = SEQUENCE
    made.training.disable_cuda_graphs = True
    made.training.mixed_precision_param = "float32"
    made.parallelism = ParallelismConfig(
        tensor_parallel_degree=tp,
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    made.tokenizer, made.dataloader = NoTokenizer.Config(), Sequences.Config(padded=padded)
    made.checkpoint.enable = made.validator.enable = False
    made.comm.trace_buf_size = 0
    made.debug.seed = 7
    made.activation_checkpoint = None
    return made
