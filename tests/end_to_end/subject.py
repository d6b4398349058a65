"""The script that is trained and killed: a tiny model with every odd kind of parameter.

Started by `recover run` with its settings as one argument. Each rank keeps, in a file per step, the
parameters before the step and the gradients that its optimizer was given; the tests compute those
again from the recorded microbatch ids, in one process. It imports nothing from the tests.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recover

WORDS, WIDTH, SENTENCE = 11, 8, 6


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run does; everything that is not the launcher's business."""

    steps: int = 7
    microbatches: int = 12
    stack: str = "plain"
    in_place: bool = False
    overlap: bool = False
    restore: str = "auto"
    policy: str = "static"
    data: str = "exact"
    dtype: str = "float32"
    clip_norm: float | None = None
    rare_every: int = 5
    """Microbatches whose id is a multiple of this use one more layer."""
    careless: bool = False
    """Zero the gradients before every microbatch, as a loop without accumulation does."""
    no_sync: bool = False
    """Tell DDP to leave every microbatch alone, as a script that accumulates by itself may."""
    kept: str = ""
    """Directory for what each rank keeps."""

    def to_json(self) -> str:
        """Return the script's argument."""
        return json.dumps(asdict(self))


class Odd(nn.Module):
    """Tied, frozen, unused, rarely used and scalar parameters, and one in fp64."""

    def __init__(self, rare_every: int) -> None:
        super().__init__()
        self.rare_every = rare_every
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, 2 * WIDTH)
        self.frozen = nn.Linear(2 * WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.float64))

    def forward(self, microbatch: Tensor) -> Tensor:  # (sequences, 1 + SENTENCE + 1) int64
        number, words = int(microbatch[0, 0]), microbatch[:, 1:]
        hidden = torch.tanh(self.body(self.embed(words[:, :-1])))  # (sequences, SENTENCE, 2 WIDTH)
        hidden = self.scale * self.frozen(hidden) + self.shift.to(self.scale.dtype)
        if number % self.rare_every == 0:
            hidden = hidden + self.rare(hidden)
        logits = self.head(hidden)  # (sequences, SENTENCE, WORDS)
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum; a parameter without a gradient is left alone.

    It does without the constructor of torch's optimizers, which loads torch's compiler: that would
    take longer than the whole run.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.velocities = {p: torch.zeros_like(p) for p in parameters if p.requires_grad}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Follow the gradient."""
        for parameter, velocity in self.velocities.items():
            if parameter.grad is not None:
                velocity.mul_(0.8).add_(parameter.grad)
                parameter.sub_(velocity, alpha=0.05)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for parameter in self.velocities:
            parameter.grad = None


class Sentences:
    """Microbatch ``i`` is a function of ``i``: its number, and words that follow a rule."""

    def __getitem__(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        first = torch.randint(0, WORDS, (3, 1), generator=generator)
        stride = torch.randint(1, 3, (3, 1), generator=generator)
        words = (first + stride * torch.arange(SENTENCE + 1)) % WORDS
        return torch.cat([torch.full((3, 1), number), words], dim=1)  # (3, 1 + SENTENCE + 1)


def build(settings: Settings, seed: int) -> Odd:
    """Return the model; replicas draw different parameters, which the start makes equal."""
    torch.manual_seed(seed)
    model = Odd(settings.rare_every)
    if settings.dtype == "bfloat16":
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def own_stream(data: Sentences, replica: int, replicas: int) -> Iterator[Tensor]:
    """Yield one replica's own microbatches, without end."""
    return (data[number] for number in itertools.count(replica, replicas))


def tensors(model: nn.Module, *, gradients: bool) -> dict[str, Tensor | None]:
    """Return copies of the parameters or of their gradients, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter
        found[name] = None if tensor is None else tensor.detach().clone()
    return found


def synchronised_as(settings: Settings, model: nn.Module) -> AbstractContextManager[None]:
    """Return the context that a script with its own accumulation puts around a pass."""
    if settings.no_sync and isinstance(model, DistributedDataParallel):
        quiet: AbstractContextManager[None] = model.no_sync()
        return quiet
    return nullcontext()


def main(settings: Settings) -> None:
    """Train as ``settings`` say."""
    torch.set_num_threads(1)
    job = recover.init(
        microbatches=settings.microbatches, policy=settings.policy, restore=settings.restore
    )
    odd = build(settings, seed=job.replica)
    model: nn.Module = odd
    if settings.stack == "ddp":
        model = DistributedDataParallel(
            odd, process_group=job.process_group, find_unused_parameters=True, bucket_cap_mb=1e-3
        )
    optimizer = Momentum(odd.parameters())
    trainer = recover.Trainer(
        job,
        model,
        optimizer,
        clip_norm=settings.clip_norm,
        bucket_mb=512 / 2**20,  # five buckets
        in_place=settings.in_place,
        overlap=settings.overlap,
    )
    data: Sentences | Iterable[Tensor] = Sentences()
    if settings.data == "stream":
        data = own_stream(Sentences(), job.replica, job.replicas)
    for step in trainer.steps(data, until=settings.steps):
        parameters = tensors(odd, gradients=False)
        optimizer.zero_grad()
        for microbatch in step:
            if settings.careless:
                optimizer.zero_grad()
            with synchronised_as(settings, model):
                step.backward(model(microbatch), tokens=3 * SENTENCE)
        record = step.commit()
        kept = {"parameters": parameters, "gradients": tensors(odd, gradients=True)}
        torch.save(kept, kept_file(Path(settings.kept), step.number, job.replica))
        print(f"step {record.step} loss {record.loss:.6f}")


def kept_file(directory: Path, step: int, replica: int) -> Path:
    """Where a rank keeps what a step did."""
    return directory / f"step-{step}-replica-{replica}.pt"


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
