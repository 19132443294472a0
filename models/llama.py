"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Sources: Touvron et al., "LLaMA", 2023; Dubey et al., "The Llama 3 Herd of Models", 2024 (sizes); Su et al., "RoFormer",
2021 (rotary positions; dims i and i + head_dim/2 turn together); Ainslie et al., "GQA", 2023; Shazeer, "GLU Variants
Improve Transformer", 2020.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtengine.data import Batch
from dtengine.model import Model, ModelConfig, Param, Tied
from dtengine.ops import Ops

STD = 0.02
ROPE_THETA = 500_000.0  # Llama 3


def specs(config: ModelConfig) -> dict:
    """Describe the parameters; the two projections into the residual stream start smaller, by 1/sqrt(2 layers)."""
    if config.head_dim % 2:
        raise ValueError(f"--head-dim {config.head_dim}: rotary positions turn pairs of dims. Use an even head dim.")
    embed, mlp = config.embed, config.mlp
    q, kv = (embed, config.kv_heads, config.q_per_kv, config.head_dim), (embed, config.kv_heads, config.head_dim)
    small = STD / math.sqrt(2 * config.layers)
    table = Param("vocab embed", (config.vocab, embed), STD)
    norm = Param("embed", (embed,), mean=1.0)
    block = {
        "attention": {
            "norm": norm,
            "q": Param("embed kv_heads q_per_kv head_dim", q, STD),
            "k": Param("embed kv_heads head_dim", kv, STD),
            "v": Param("embed kv_heads head_dim", kv, STD),
            "out": Param("embed kv_heads q_per_kv head_dim", q, small),
        },
        "mlp": {
            "norm": norm,
            "gate": Param("embed mlp", (embed, mlp), STD),
            "up": Param("embed mlp", (embed, mlp), STD),
            "down": Param("embed mlp", (embed, mlp), small),
        },
    }
    return {
        "embed": {"table": table},
        "blocks": [block] * config.layers,
        "head": {"norm": norm, "unembed": Tied("embed.table") if config.tied else table},
    }


def embed(params: dict, batch: Batch, ops: Ops) -> Tensor:
    """Look tokens up: [batch, res_seq, embed]."""
    return ops.dropout(ops.embedding(params["table"], batch.tokens), "batch res_seq embed", "embed")


def block(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """Apply attention and MLP, each on the normalised residual stream [batch, res_seq, embed]."""
    x = _add(ops, x, attention(params["attention"], x, ops), "attention")
    return _add(ops, x, mlp(params["mlp"], x, ops), "mlp")


def attention(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """Grouped-query causal attention with rotary positions: [batch, res_seq, embed] -> the same.

    Collectives:
        Over tp: forward one all-reduce (with sequence parallel one all-gather and one reduce-scatter); backward the
        same.
    """
    h = ops.constrain(ops.rms_norm(x, params["norm"]), "batch seq embed")
    q_axes, kv_axes = "batch kv_heads q_per_kv seq head_dim", "batch kv_heads seq head_dim"
    q = ops.einsum(f"batch seq embed, embed kv_heads q_per_kv head_dim -> {q_axes}", h, params["q"])
    k = ops.einsum(f"batch seq embed, embed kv_heads head_dim -> {kv_axes}", h, params["k"])
    v = ops.einsum(f"batch seq embed, embed kv_heads head_dim -> {kv_axes}", h, params["v"])
    h = ops.attention(rotate(ops, q, q_axes), rotate(ops, k, kv_axes), v)
    h = ops.einsum(f"{q_axes}, embed kv_heads q_per_kv head_dim -> batch seq embed", h, params["out"])
    return ops.constrain(h, "batch res_seq embed")


def rotate(ops: Ops, x: Tensor, axes: str) -> Tensor:
    """Turn each pair of dims (i, i + head_dim/2) by position x frequency i."""
    position = ops.index("seq", x.shape[-2], x.device)

    def turn(x: Tensor, position: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        wide = torch.promote_types(x.dtype, torch.float32)
        frequency = ROPE_THETA ** (-torch.arange(half, device=x.device, dtype=wide) / half)
        angle = position.to(wide).unsqueeze(-1) * frequency
        return _Turn.apply(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))  # type: ignore[return-value]

    return ops.local(turn, f"{axes}, seq -> {axes}", x, position, whole="head_dim")


class _Turn(torch.autograd.Function):
    """Turn pairs (first half, second half) by an angle; the gradient is turned back, without derived slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, -1)
        return _turned(first, second, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        first, second = grad.chunk(2, -1)
        return _turned(first, second, cos, sin, -1), None, None


def _turned(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    turned = torch.addcmul(first * cos, second, sin, value=-way), torch.addcmul(second * cos, first, sin, value=way)
    return torch.cat(turned, -1)


def mlp(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """SwiGLU: [batch, res_seq, embed] -> the same.

    Collectives:
        As ``attention``.
    """
    h = ops.constrain(ops.rms_norm(x, params["norm"]), "batch seq embed")
    gate = ops.einsum("batch seq embed, embed mlp -> batch seq mlp", h, params["gate"])
    up = ops.einsum("batch seq embed, embed mlp -> batch seq mlp", h, params["up"])
    h = ops.local(lambda g, u: F.silu(g) * u, "batch seq mlp, batch seq mlp -> batch seq mlp", gate, up)
    h = ops.einsum("batch seq mlp, embed mlp -> batch seq embed", h, params["down"])
    return ops.constrain(h, "batch res_seq embed")


def head(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """Normalise and project to logits [batch, seq, vocab]."""
    h = ops.constrain(ops.rms_norm(x, params["norm"]), "batch seq embed")
    return ops.einsum("batch seq embed, vocab embed -> batch seq vocab", h, params["unembed"])


def _add(ops: Ops, x: Tensor, h: Tensor, site: str) -> Tensor:
    return ops.add(x, ops.dropout(h, "batch res_seq embed", site))


_LLAMA3 = {"kv_heads": 8, "vocab": 128256, "seq": 8192}

MODEL = Model(
    specs,
    embed,
    block,
    head,
    defaults={"tied": False},
    sizes={  # layers, widths and heads as published; context as pre-trained
        "llama-7b": {"layers": 32, "embed": 4096, "heads": 32, "mlp": 11008, "vocab": 32000, "seq": 2048},
        "llama-13b": {"layers": 40, "embed": 5120, "heads": 40, "mlp": 13824, "vocab": 32000, "seq": 2048},
        "llama3.2-1b": _LLAMA3 | {"layers": 16, "embed": 2048, "heads": 32, "mlp": 8192, "tied": True},
        "llama3.2-3b": _LLAMA3 | {"layers": 28, "embed": 3072, "heads": 24, "mlp": 8192, "tied": True},
        "llama3-8b": _LLAMA3 | {"layers": 32, "embed": 4096, "heads": 32, "mlp": 14336},
        "llama3-70b": _LLAMA3 | {"layers": 80, "embed": 8192, "heads": 64, "mlp": 28672},
        "llama3-405b": _LLAMA3 | {"layers": 126, "embed": 16384, "heads": 128, "mlp": 53248},
    },
)
