"""The reference decoder: what it computes, and that it is a function of (config, seed, dtype)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from recover.train.model import (
    PRESETS,
    Block,
    Decoder,
    ModelConfig,
    build,
    parameter_count,
    preset,
    rotary_table,
    rotate,
)
from recover.train.moe import MixtureOfExperts

MICRO = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, hidden=64, sequence=16)
CPU = torch.device("cpu")


def random_tokens(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, width), generator=generator)  # (rows, width) int64


@pytest.mark.parametrize("position", [1, 5, 16])
def test_a_later_token_does_not_change_an_earlier_loss(position: int) -> None:
    model = build(MICRO, seed=0)
    tokens = random_tokens(2, 17)
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % 256
    before, after = model.token_losses(tokens), model.token_losses(changed)  # (2, 16)
    assert torch.equal(before[:, : position - 1], after[:, : position - 1])
    assert not torch.equal(before[:, position - 1], after[:, position - 1])  # its own target


def test_grouped_heads_equal_full_attention_with_repeated_key_value_heads() -> None:
    grouped = build(MICRO, seed=0)
    full = Decoder(replace(MICRO, kv_heads=MICRO.heads))
    state = dict(grouped.state_dict())
    for name in state:
        if name.endswith(("key.weight", "value.weight")):  # (K * E, D)
            heads = state[name].reshape(MICRO.kv_heads, MICRO.head_dim, MICRO.dim)
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = random_tokens(3, 17)
    torch.testing.assert_close(grouped.token_losses(tokens), full.token_losses(tokens))


def test_rotary_scores_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    table = rotary_table(64, 8, 10_000.0, CPU)  # (64, 4)
    queries = rotate(query.expand(1, 1, 64, 8), table)[0, 0]  # (64, 8), one per position
    keys = rotate(key.expand(1, 1, 64, 8), table)[0, 0]  # (64, 8)
    scores = queries @ keys.T  # (query position, key position)
    for distance in (0, 1, 7, 40):
        same = scores.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-5)
    assert scores[0, 0] != pytest.approx(float(scores[9, 0]), abs=1e-3)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(64))


def test_the_loss_is_that_of_a_plain_softmax() -> None:
    model = build(MICRO, seed=0)
    tokens = random_tokens(2, 17)
    chances = model.logits(tokens[:, :-1]).softmax(-1)  # (2, 16, V)
    expected = -chances.gather(-1, tokens[:, 1:, None]).log().mean()
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_agrees_with_finite_differences(tied: bool) -> None:
    """With tied weights the embedding's gradient is the sum over both of its uses."""
    model = build(replace(MICRO, tie_embeddings=tied), seed=0)
    tokens = random_tokens(2, 9)
    model(tokens).backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn(parameter.shape, generator=generator)
        direction = 0.5 * direction + parameter.grad / parameter.grad.norm() * direction.norm()
        slope = float((parameter.grad * direction).sum())
        width = 1e-2 / float(direction.norm())
        with torch.no_grad():
            parameter.add_(direction, alpha=width)
            above = model.token_losses(tokens).double().mean()
            parameter.add_(direction, alpha=-2 * width)
            below = model.token_losses(tokens).double().mean()
            parameter.add_(direction, alpha=width)
        assert float(above - below) / (2 * width) == pytest.approx(slope, rel=2e-2), name


def test_a_tie_is_one_parameter_and_survives_a_cast() -> None:
    tied, loose = build(MICRO, seed=0), build(replace(MICRO, tie_embeddings=False), seed=0)
    assert parameter_count(loose) - parameter_count(tied) == 256 * 32
    assert parameter_count(tied.to(torch.bfloat16).to(torch.float32)) == parameter_count(tied)
    assert "output.weight" not in tied.state_dict()


@pytest.mark.parametrize(("name", "count"), [("tiny", 328_320), ("small", 12_687_744)])
def test_parameter_counts_of_the_presets(name: str, count: int) -> None:
    config = PRESETS[name]
    assert parameter_count(build(config, seed=0)) == count
    attention = 2 * config.dim**2 + 2 * config.dim * config.kv_heads * config.head_dim
    layer = attention + 3 * config.dim * config.hidden + 2 * config.dim
    assert count == config.layers * layer + config.vocab * config.dim + config.dim


@pytest.mark.parametrize("config", [MICRO, PRESETS["tiny"]])
def test_the_first_loss_is_that_of_a_guess(config: ModelConfig) -> None:
    loss = build(config, seed=0)(random_tokens(4, config.sequence + 1))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_residual_projections_start_smaller() -> None:
    model = build(replace(MICRO, layers=8, dim=64), seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        expected = 0.02 / 4 if ".output." in name else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_build_depends_on_its_arguments_only() -> None:
    torch.manual_seed(1)
    untouched = torch.random.get_rng_state()
    first = build(MICRO, seed=3)
    assert torch.equal(torch.random.get_rng_state(), untouched)
    torch.manual_seed(2)
    second, other = build(MICRO, seed=3), build(MICRO, seed=4)
    tokens = random_tokens(2, 17)
    for model in (first, second):
        model(tokens).backward()
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_bfloat16_weights_are_the_rounded_ones_and_the_loss_stays_fp32() -> None:
    wide, narrow = build(MICRO, seed=0), build(MICRO, seed=0, dtype=torch.bfloat16)
    for one, two in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert two.dtype == torch.bfloat16
        assert torch.equal(one.to(torch.bfloat16), two)
    tokens = random_tokens(2, 17)
    loss = narrow(tokens)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wide(tokens).item(), abs=0.02)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in narrow.parameters())


def test_a_shorter_sequence_is_a_prefix() -> None:
    model = build(MICRO, seed=0)
    tokens = random_tokens(2, 17)
    short = model.token_losses(tokens[:, :9])  # (2, 8)
    torch.testing.assert_close(short, model.token_losses(tokens)[:, :8])


def test_experts_say_what_each_token_alone_would_hear() -> None:
    model = build(replace(MICRO, experts=4), seed=0)
    mixture = model.blocks[0].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))  # (B, S, D)
    expected = torch.empty_like(x)
    for place in itertools.product(range(2), range(5)):
        scores = mixture.router(x[place])  # (X,)
        best, chosen = scores.topk(2)
        heard = [
            mixture.output[e] @ (F.silu(mixture.gate[e] @ x[place]) * (mixture.up[e] @ x[place]))
            for e in chosen
        ]
        expected[place] = best.softmax(0) @ torch.stack(heard)
    torch.testing.assert_close(mixture(x), expected)


def test_experts_start_as_a_dense_layer_does_and_idle_ones_get_no_gradient() -> None:
    model = build(replace(MICRO, layers=8, dim=64, experts=4), seed=0)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            expected = 0.02 / 4 if name.endswith(("output", "output.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
    model(random_tokens(1, 2)).backward()  # one token: at most two of four experts work
    for block in model.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.feed_forward, MixtureOfExperts)
        gradient = block.feed_forward.gate.grad
        assert gradient is not None
        assert int(gradient.flatten(1).any(dim=1).sum()) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be positive, got 0"),
        ({"vocab": -1}, "vocab must be positive, got -1"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be positive, got 0.0"),
        ({"experts": 1}, "experts=1 must be 0 .a dense model. or at least experts_per_token=2"),
        ({"dim": 30}, "dim=30 is not a multiple of heads=4"),
        ({"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"dim": 12}, "dim=12 / heads=4 = 3"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MICRO, **change)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, 18, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.zeros(17, dtype=torch.int64),
        torch.zeros(2, 17, dtype=torch.int32),
    ],
)
def test_tokens_of_a_wrong_shape_are_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be int64 of shape \(microbatch, 2 to 17\)"):
        build(MICRO, seed=0)(tokens)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown preset 'huge'; choose one of nano, tiny, tiny_moe, small"
    ):
        preset("huge")
    assert preset("tiny") is PRESETS["tiny"]
    with pytest.raises(ValueError, match=r"got torch\.float16"):
        build(MICRO, seed=0, dtype=torch.float16)
