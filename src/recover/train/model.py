"""A small LLaMA-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

With ``experts`` set, every feed-forward layer is a mixture of experts (``recover.train.moe``).

Layer: `train`. The reference model of the trainer, the demo and the benchmarks; the paper
trains the same family (Section 5). Written to be read in one sitting: nothing here knows about
replicas or failures, and any other `nn.Module` can stand in its place.

Two choices matter to the rest of the library:

- **The model is a function of (config, seed, dtype).** `build` draws every weight in fp32 from its
  own generator, in a fixed order, and casts afterwards. It leaves torch's global generator alone.
- **There are no buffers.** The rotary table is computed where it is used (it is tiny), so that a
  cast of the module never rounds it, a data-parallel stack never broadcasts it, and a block can
  stand alone in a pipeline stage.

Axes: B sequences of a microbatch, S positions, D model width, H query heads, K key-value heads,
E width of one head, F width of the feed-forward layer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recover.train.moe import MixtureOfExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. Raises ValueError, with the values, where the parts do not fit."""

    vocab: int = 256
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    sequence: int
    tie_embeddings: bool = True
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    experts: int = 0
    """Experts of every feed-forward layer; 0 for a dense model."""
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("tie_embeddings", "experts") and not value > 0:
                raise ValueError(f"{field.name} must be positive, got {value}")
        if self.experts and not self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts={self.experts} must be 0 (a dense model) or at least "
                f"experts_per_token={self.experts_per_token}"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"rotary positions need an even head width, got dim={self.dim} / "
                f"heads={self.heads} = {self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Return E, the width of one attention head."""
        return self.dim // self.heads


PRESETS: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "nano": ModelConfig(layers=2, dim=64, heads=2, kv_heads=1, hidden=128, sequence=64),
        "tiny": ModelConfig(layers=2, dim=128, heads=4, kv_heads=2, hidden=256, sequence=128),
        "tiny_moe": ModelConfig(
            layers=2, dim=128, heads=4, kv_heads=2, hidden=128, sequence=128, experts=4
        ),
        "small": ModelConfig(layers=8, dim=384, heads=6, kv_heads=2, hidden=1024, sequence=256),
    }
)


def preset(name: str) -> ModelConfig:
    """Return the named preset; raises ValueError that lists the names there are."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def rotary_table(positions: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Return the unit complex numbers that turn a head's pairs, (positions, head_dim / 2).

    Pair i at position p turns by the angle p * base ** (-2 i / head_dim). Always complex64.
    """
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)  # (E/2,)
    frequencies = base ** (-pairs / head_dim)  # (E/2,)
    steps = torch.arange(positions, device=device, dtype=torch.float32)  # (S,)
    angles = torch.outer(steps, frequencies)  # (S, E/2)
    return torch.polar(torch.ones_like(angles), angles)  # (S, E/2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (2 i, 2 i + 1) of x (B, heads, S, E) by the table; fp32 inside."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))  # (B, heads, S, E/2)
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)  # (B, heads, S, E)


class RMSNorm(nn.Module):
    """Scale by the reciprocal root mean square, taken in fp32 whatever the parameters are."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)  # (B, S, 1)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention in which every key-value head serves heads / kv_heads query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_base = config.rope_base
        kv_dim = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        table = rotary_table(x.shape[1], self.head_dim, self.rope_base, x.device)
        query = rotate(self._split(self.query(x)), table)  # (B, H, S, E)
        key = rotate(self._split(self.key(x)), table)  # (B, K, S, E)
        value = self._split(self.value(x))  # (B, K, S, E)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )  # (B, H, S, E)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))  # (B, S, D)
        return projected

    def _split(self, x: Tensor) -> Tensor:
        """Turn (B, S, heads * E) into (B, heads, S, E)."""
        return x.reshape(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate(x)) * self.up(x)  # (B, S, F)
        projected: Tensor = self.output(inner)  # (B, S, D)
        return projected


class Block(nn.Module):
    """One pre-norm residual layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.feed_forward = (
            MixtureOfExperts(
                dim=config.dim,
                hidden=config.hidden,
                experts=config.experts,
                per_token=config.experts_per_token,
            )
            if config.experts
            else FeedForward(config)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # (B, S, D)
        added: Tensor = self.feed_forward(self.feed_forward_norm(x))  # (B, S, D)
        return x + added


def next_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each of targets (B, S) under logits (B, S, V), as (B, S)."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


class Decoder(nn.Module):
    """The language model. `build` makes one whose weights are ready to train.

    With tied embeddings the one matrix is a single parameter used twice; there is no second name
    for it, so moving, casting or sharding the module cannot break the tie.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_epsilon)
        self.output = (
            None if config.tie_embeddings else nn.Linear(config.dim, config.vocab, bias=False)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy, a scalar in fp32, of predicting tokens[:, 1:].

        tokens: (microbatch, sequence + 1) int64; a shorter sequence is fine, a longer one is not.
        """
        return self.token_losses(tokens).mean()

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Return the cross-entropy of every next token, (microbatch, sequence) fp32."""
        longest = self.config.sequence + 1
        if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= longest or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens must be int64 of shape (microbatch, 2 to {longest}), "
                f"got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        logits = self.logits(tokens[:, :-1])  # (B, S, V) fp32
        return next_token_losses(logits, tokens[:, 1:])

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token, (microbatch, sequence, vocab) fp32."""
        x = self.embedding(tokens)  # (B, S, D)
        for block in self.blocks:
            x = block(x)
        weight = self.embedding.weight if self.output is None else self.output.weight  # (V, D)
        return F.linear(self.norm(x), weight).float()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights again: normal, and smaller where a projection ends in the residual.

        Every layer adds two such projections to the residual stream; scaling them by
        1 / sqrt(2 layers) keeps its size independent of the depth.
        """
        generator = torch.Generator().manual_seed(seed)
        deviation = 0.02
        residual = deviation / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            ends_in_residual = name.endswith(
                ("attention.output.weight", "feed_forward.output.weight", "feed_forward.output")
            )
            drawn = torch.empty(parameter.shape)  # on the CPU, so that the device cannot matter
            drawn.normal_(std=residual if ends_in_residual else deviation, generator=generator)
            parameter.copy_(drawn)


def build(config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return a decoder on the CPU whose weights depend on nothing but the arguments.

    Weights are drawn in fp32 and then rounded to `dtype` (torch.float32 or torch.bfloat16).
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
    with torch.random.fork_rng(devices=[]):  # torch's own first draw, which is then replaced
        model = Decoder(config)
    model.initialise(seed)
    return model.to(dtype)


def parameter_count(model: nn.Module) -> int:
    """Return the number of elements of all parameters; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
