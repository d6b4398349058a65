"""What chaos.py trains: a few megabytes of parameters, quick steps, long reductions.

Its model and data are written so that chaos.py can compute any step again from microbatch ids
alone. Each rank writes its process id, so that it can be shot from outside, and at the end what it
holds.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recover

WIDTH = 8
BALLAST = 500_000
"""Elements of one more parameter: reductions take long enough to be hit in the middle."""


class Model(nn.Module):
    """A small regression, and a parameter that only makes buckets larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, 1)
        self.ballast = nn.Parameter(torch.full((BALLAST,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:  # (n, WIDTH)
        guessed = self.second(torch.tanh(self.first(inputs))).squeeze(1)  # (n,)
        wanted = torch.sin(inputs.sum(1))
        loss: Tensor = ((guessed - wanted) ** 2).mean() + (self.ballast**2).mean()
        return loss


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum.

    It does without the constructor of torch's optimizers, which loads torch's compiler: that would
    take longer than the whole run.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.velocities = {parameter: torch.zeros_like(parameter) for parameter in parameters}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Follow the gradient."""
        for parameter, velocity in self.velocities.items():
            assert parameter.grad is not None, "every parameter is used by every microbatch"
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(velocity, alpha=0.05)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for parameter in self.velocities:
            parameter.grad = None


def microbatch(number: int) -> Tensor:
    """Return microbatch ``number``: (4, WIDTH), a function of the number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, WIDTH, generator=generator)


def model_and_optimizer(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """Return both, as every replica and the checker start with."""
    torch.manual_seed(seed)
    model = Model()
    return model, Momentum(model.parameters())


class Numbered:
    """Data by index."""

    def __getitem__(self, number: int) -> Tensor:
        return microbatch(number)


def own_stream(replica: int, replicas: int) -> Iterator[Tensor]:
    """Yield one replica's own microbatches, without end."""
    return (microbatch(number) for number in itertools.count(replica, replicas))


def main(settings: dict[str, object], place: Path) -> None:
    """Train as ``settings`` say; leave what the checker needs in ``place``."""
    torch.set_num_threads(1)
    job = recover.init(microbatches=int(str(settings["microbatches"])))
    model, optimizer = model_and_optimizer(seed=int(str(settings["seed"])))
    trained: nn.Module = model
    if settings["stack"] == "ddp":
        trained = DistributedDataParallel(model, process_group=job.process_group)
    trainer = recover.Trainer(
        job, trained, optimizer, bucket_mb=1.0, in_place=bool(settings["in_place"])
    )
    data: Numbered | Iterable[Tensor] = Numbered()
    if settings["data"] == "stream":
        data = own_stream(job.replica, job.replicas)
    for step in trainer.steps(data, until=int(str(settings["steps"]))):
        if step.number == 0:
            publish(place / f"pid-{job.replica}", str(os.getpid()))
        for inputs in step:
            step.backward(trained(inputs))
        step.commit()
    sums = [parameter.detach().double().sum().item() for parameter in model.parameters()]
    publish(place / f"sums-{job.replica}", json.dumps(sums))


def publish(file: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
