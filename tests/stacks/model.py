"""The model of these tests, its data and its optimizer; also what one process trains alone."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

WORDS, WIDTH, SENTENCE, SENTENCES = 11, 8, 6, 4
MICROBATCH_TOKENS = SENTENCE * SENTENCES


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.as_tensor(self.down(torch.tanh(self.up(hidden))))


class Frozen(nn.Linear):
    """A matrix that is not trained."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Tiny(nn.Module):
    """Embedding and head are one matrix; one layer is frozen, another one never used.

    A stage of a pipeline is a part of it: the rest is set to None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(WORDS, WIDTH)
        self.frozen: Frozen | None = Frozen()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(3)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.unused: nn.Linear | None = nn.Linear(3, 3)
        self.head: nn.Linear | None = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, hidden: Tensor) -> Tensor:  # (sentences, SENTENCE) int64, or a stage's input
        if self.embed is not None and self.frozen is not None:
            hidden = self.frozen(self.embed(hidden))  # (sentences, SENTENCE, WIDTH)
        for block in self.blocks.values():
            hidden = block(hidden)
        if self.norm is None or self.head is None:
            return hidden
        logits: Tensor = self.head(self.norm(hidden))  # (sentences, SENTENCE, WORDS)
        return logits


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean loss per word."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def build(seed: int) -> Tiny:
    """Return the model; replicas draw different parameters, which the start makes equal."""
    torch.manual_seed(seed)
    return Tiny()


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum, without torch's constructor, which loads the compiler."""

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
    """Microbatch ``i`` is a function of ``i``: words that follow a rule."""

    def __getitem__(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        first = torch.randint(0, WORDS, (SENTENCES, 1), generator=generator)
        stride = torch.randint(1, 3, (SENTENCES, 1), generator=generator)
        return (first + stride * torch.arange(SENTENCE + 1)) % WORDS  # (SENTENCES, SENTENCE + 1)
