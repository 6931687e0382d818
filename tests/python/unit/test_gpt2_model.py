"""The GPT-2 example's model: shapes, initial values, causality, generation."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt2"
sys.path.insert(0, str(EXAMPLE))

from model import GPT2, SHAPES, GPT2Config, generate, num_parameters  # noqa: E402

# Without biases rounded: published counts of the GPT-2 family, then 12 * layers * hidden^2.
EXPECTED_BILLIONS = {
    "tiny": 0.000834, "124M": 0.1244, "350M": 0.3548, "774M": 0.7740, "1.5B": 1.5576,
    "10B": 9.88, "30B": 29.98,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = GPT2(SHAPES[name])
    counted = sum(p.numel() for p in model.parameters())  # A tied tensor is listed once.
    assert counted == num_parameters(SHAPES[name])
    assert counted / 1e9 == pytest.approx(EXPECTED_BILLIONS[name], rel=2e-3)


def test_exact_count_of_the_smallest_published_shape() -> None:
    assert num_parameters(SHAPES["124M"]) == 124_439_808
    assert num_parameters(SHAPES["1.5B"]) == 1_557_611_200


def test_heads_must_divide_hidden() -> None:
    with pytest.raises(ValueError, match="not a multiple of 5 heads"):
        GPT2Config(num_layers=1, num_heads=5, hidden=64)


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(0)
    return GPT2(GPT2Config(num_layers=2, num_heads=2, hidden=32, context=16, vocabulary_size=64))


def test_loss_starts_at_a_uniform_guess(model: GPT2) -> None:
    tokens = torch.randint(64, (8, 16))
    logits, loss = model(tokens, torch.randint(64, (8, 16)))
    assert logits.shape == (8, 16, 64)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(64), abs=0.1)


def test_loss_is_fp32_in_bf16(model: GPT2) -> None:
    tokens = torch.randint(64, (2, 16))
    logits, loss = model.to(torch.bfloat16)(tokens, tokens)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32


def test_initial_values(model: GPT2) -> None:
    assert model.head.weight is model.token_embedding.weight
    block = model.h[1]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for residual in (block.attention.out, block.mlp.down):
        assert residual.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
    assert not block.mlp.up.bias.any()
    assert (block.norm_1.weight == 1).all()


def test_no_token_sees_a_later_one(model: GPT2) -> None:
    model.eval()
    tokens = torch.randint(64, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 64
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    config = GPT2Config(2, 2, 32, context=16, vocabulary_size=64, dropout=0.5)
    model = GPT2(config)
    tokens = torch.randint(64, (1, 8))
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_too_long_an_input_says_so(model: GPT2) -> None:
    with pytest.raises(ValueError, match="17 tokens are more than the context of 16"):
        model(torch.zeros(1, 17, dtype=torch.long))


class NextIsPlusOne(nn.Module):
    """Prefers token + 1, then token + 2; notes how many tokens it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        self.seen.append(tokens.shape[1])
        logits = torch.zeros(*tokens.shape, 10)
        logits.scatter_(2, ((tokens + 1) % 10).unsqueeze(-1), 5.0)
        logits.scatter_(2, ((tokens + 2) % 10).unsqueeze(-1), 4.0)
        return logits, None


def test_generate_is_greedy_at_temperature_zero_and_keeps_to_the_context() -> None:
    model = NextIsPlusOne()
    tokens = generate(model, torch.tensor([[7]]), 6, context=4, temperature=0)
    assert tokens.tolist() == [[7, 8, 9, 0, 1, 2, 3]]
    assert model.seen == [1, 2, 3, 4, 4, 4]


def test_generate_draws_among_the_top_k() -> None:
    start = torch.zeros(1, 1, dtype=torch.long)
    tokens = generate(NextIsPlusOne(), start, 200, context=8, top_k=2, seed=3)[0]
    steps = (tokens[1:] - tokens[:-1]) % 10
    assert set(steps.tolist()) == {1, 2}
    free = generate(NextIsPlusOne(), start, 400, context=8, temperature=3.0, seed=3)[0]
    assert len(set(((free[1:] - free[:-1]) % 10).tolist())) > 2


def test_generate_repeats_with_its_seed_and_restores_the_mode(model: GPT2) -> None:
    start = torch.zeros(1, 1, dtype=torch.long)
    first = generate(model, start, 20, context=16, seed=5)
    assert torch.equal(first, generate(model, start, 20, context=16, seed=5))
    assert not torch.equal(first, generate(model, start, 20, context=16, seed=6))
    assert model.training


def test_a_few_steps_learn(model: GPT2) -> None:
    tokens = torch.randint(64, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
