"""GPT-2, written for reading: one file, plain torch, nothing of hopshard in it.

Pre-norm blocks, learned positions, the token embedding doubles as the output layer.
Shapes in the comments: B batch, T tokens, C hidden, H heads, V vocabulary. Next: train.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPT2Config:
    """Shape of one GPT-2; `SHAPES` names the usual ones."""

    num_layers: int
    num_heads: int
    hidden: int
    context: int = 1024
    vocabulary_size: int = 50257
    dropout: float = 0.0  # 0.1 in the original; small models on much text do without.

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads != 0:
            raise ValueError(f"hidden {self.hidden} is not a multiple of {self.num_heads} heads")

    def with_options(self, **changes: int | float) -> GPT2Config:
        """The same shape with another context, vocabulary or dropout."""
        return replace(self, **changes)  # type: ignore[arg-type]


SHAPES = {
    "tiny": GPT2Config(num_layers=4, num_heads=4, hidden=128, context=64, vocabulary_size=256),
    "124M": GPT2Config(num_layers=12, num_heads=12, hidden=768),
    "350M": GPT2Config(num_layers=24, num_heads=16, hidden=1024),
    "774M": GPT2Config(num_layers=36, num_heads=20, hidden=1280),
    "1.5B": GPT2Config(num_layers=48, num_heads=25, hidden=1600),
    # Beyond the paper: 12 * 48 * 4096^2 = 9.7e9 in the blocks, and 0.2e9 in the embedding.
    "10B": GPT2Config(num_layers=48, num_heads=32, hidden=4096, context=2048),
    "30B": GPT2Config(num_layers=48, num_heads=64, hidden=7168, context=2048),
}


def num_parameters(config: GPT2Config) -> int:
    """Exact count from the shape alone; the tied output layer counts once."""
    c = config.hidden
    attention = (c * 3 * c + 3 * c) + (c * c + c)
    mlp = (c * 4 * c + 4 * c) + (4 * c * c + c)
    norms = 2 * (2 * c)
    embeddings = (config.vocabulary_size + config.context) * c
    return config.num_layers * (attention + mlp + norms) + embeddings + 2 * c


class Attention(nn.Module):
    """Causal self-attention with all heads in two matrix products."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        # [B, T, 3C] as three of [B, T, H, C / H].
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(dim=2)
        y = F.scaled_dot_product_attention(  # [B, H, T, C / H]
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.out(y.transpose(1, 2).flatten(2))  # [B, T, C]


class MLP(nn.Module):
    """Two layers, four times as wide in between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # [B, T, C]


class Block(nn.Module):
    """What hopshard treats as one unit: its parameters travel together."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))  # [B, T, C]
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT2(nn.Module):
    """Language model over tokens.

    Example:
        >>> model = GPT2(SHAPES["tiny"])
        >>> tokens = torch.randint(256, (2, 16))
        >>> logits, loss = model(tokens, targets=tokens)
        >>> logits.shape
        torch.Size([2, 16, 256])
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.hidden)
        self.position_embedding = nn.Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary_size, bias=False)
        self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's initial values: 0.02, and less where a block adds to the residual stream."""
        # Two additions per layer; so the stream's variance does not grow with the depth.
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                is_residual = name.endswith(("attention.out", "mlp.down"))
                module.weight.normal_(std=residual_std if is_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss if there are targets.

        Args:
            tokens: int64 [B, T], T at most `config.context`.
            targets: int64 [B, T]: the token that follows each one.

        Returns:
            Logits [B, T, V] and the mean cross-entropy in nats, always fp32.
        """
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.context:
            raise ValueError(
                f"{num_tokens} tokens are more than the context of {self.config.context}"
            )
        positions = torch.arange(num_tokens, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.h:
            x = block(x)  # [B, T, C]
        logits = self.head(self.norm(x))  # [B, T, V]
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    num_new: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continues `tokens`, one at a time.

    Collective where `model` is a DistributedModel: all ranks call it with the same prompt
    and seed, and get the same text, because each forward gathers the parameters.

    Args:
        model: Maps tokens [B, T] to (logits [B, T, V], anything).
        tokens: int64 [B, T], the prompt.
        num_new: How many tokens to add.
        context: The model sees at most so many of the last tokens.
        temperature: Below 1 is more certain; 0 always takes the likeliest token.
        top_k: Draw among the k likeliest tokens only.
        seed: Of the draws.

    Returns:
        int64 [B, T + num_new].
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    for _ in range(num_new):
        logits, _ = model(tokens[:, -context:])
        logits = logits[:, -1].float()  # [B, V]
        if temperature == 0:
            next_token = logits.argmax(dim=-1, keepdim=True)
        else:
            if top_k is not None:
                floor = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < floor, -math.inf)
            probabilities = F.softmax(logits / temperature, dim=-1)
            next_token = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, next_token], dim=1)
    model.train(was_training)
    return tokens
