"""Parameters that several ranks of a replica hold together. Layer: parallel.

A weight that two pipeline stages use (embedding and head), or the dense weights of a model whose
experts are spread over ranks that run different tokens: each holder computes a part of the
gradient, and the gradient is their sum. Summing is linear, so it is done once, after the reduction
across replicas, on the reduced gradient: this rank's own accumulator stays what it was, and an
extra pass after a failure adds to it as any other does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True)
class Tied:
    """These parameters' gradients are summed over ``group``, a group inside the replica.

    Every member of the group lists the same number of parameters, of the same shapes, in the same
    order. Raises ValueError for a list without parameters.
    """

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        object.__setattr__(self, "parameters", tuple(parameters))
        object.__setattr__(self, "group", group)
        if not self.parameters:
            raise ValueError("nothing is tied: the list of parameters is empty")
