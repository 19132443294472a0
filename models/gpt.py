"""GPT-2: LayerNorm, learned positions, GELU, biases, tied embedding, dropout.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Dropout acts on the embedding and on
both residual branches, not on attention weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dtengine.data import Batch
from dtengine.model import Model, ModelConfig, Param, Tied
from dtengine.ops import Ops

STD = 0.02


def specs(config: ModelConfig) -> dict:
    """Describe the parameters; the two projections into the residual stream start smaller, by 1/sqrt(2 layers)."""
    embed, mlp = config.embed, config.mlp
    q, kv = (config.kv_heads, config.q_per_kv, config.head_dim), (config.kv_heads, config.head_dim)
    q_axes, kv_axes = "kv_heads q_per_kv head_dim", "kv_heads head_dim"
    small = STD / math.sqrt(2 * config.layers)
    table = Param("vocab embed", (config.vocab, embed), STD)
    block = {
        "attention": {
            "norm": _norm(embed),
            "q": {"weight": Param(f"embed {q_axes}", (embed, *q), STD), "bias": Param(q_axes, q)},
            "k": {"weight": Param(f"embed {kv_axes}", (embed, *kv), STD), "bias": Param(kv_axes, kv)},
            "v": {"weight": Param(f"embed {kv_axes}", (embed, *kv), STD), "bias": Param(kv_axes, kv)},
            "out": {"weight": Param(f"embed {q_axes}", (embed, *q), small), "bias": Param("embed", (embed,))},
        },
        "mlp": {
            "norm": _norm(embed),
            "up": {"weight": Param("embed mlp", (embed, mlp), STD), "bias": Param("mlp", (mlp,))},
            "down": {"weight": Param("embed mlp", (embed, mlp), small), "bias": Param("embed", (embed,))},
        },
    }
    return {
        "embed": {"table": table, "positions": Param("positions embed", (config.seq, embed), STD)},
        "blocks": [block] * config.layers,
        "head": {"norm": _norm(embed), "unembed": Tied("embed.table") if config.tied else table},
    }


def _norm(embed: int) -> dict:
    return {"weight": Param("embed", (embed,), mean=1.0), "bias": Param("embed", (embed,))}


def embed(params: dict, batch: Batch, ops: Ops) -> Tensor:
    """Add token and position embeddings: [batch, res_seq, embed]."""
    x = ops.embedding(params["table"], batch.tokens)
    positions = ops.index("res_seq", x.shape[1], x.device)
    x = ops.local(
        lambda x, table, at: x + F.embedding(at, table),
        "batch res_seq embed, positions embed, res_seq -> batch res_seq embed",
        x, params["positions"], positions,
    )  # fmt: skip
    return ops.dropout(x, "batch res_seq embed", "embed")


def block(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """Apply attention and MLP, each on the normalised residual stream [batch, res_seq, embed]."""
    x = _add(ops, x, attention(params["attention"], x, ops), "attention")
    return _add(ops, x, mlp(params["mlp"], x, ops), "mlp")


def attention(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """Multi-head causal attention: [batch, res_seq, embed] -> the same.

    Collectives:
        Over tp: forward one all-reduce (with sequence parallel one all-gather and one reduce-scatter); backward the
        same.
    """
    h = ops.constrain(ops.layer_norm(x, **params["norm"]), "batch seq embed")
    q = _linear(ops, h, params["q"], "kv_heads q_per_kv seq head_dim", "kv_heads q_per_kv head_dim")
    k = _linear(ops, h, params["k"], "kv_heads seq head_dim", "kv_heads head_dim")
    v = _linear(ops, h, params["v"], "kv_heads seq head_dim", "kv_heads head_dim")
    h = ops.attention(q, k, v)
    equation = "batch kv_heads q_per_kv seq head_dim, embed kv_heads q_per_kv head_dim -> batch seq embed"
    h = ops.constrain(ops.einsum(equation, h, params["out"]["weight"]), "batch res_seq embed")
    return _bias(ops, h, params["out"]["bias"])


def mlp(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """Two matrices with GELU between: [batch, res_seq, embed] -> the same.

    Collectives:
        As ``attention``.
    """
    h = ops.constrain(ops.layer_norm(x, **params["norm"]), "batch seq embed")
    h = ops.einsum("batch seq embed, embed mlp -> batch seq mlp", h, params["up"]["weight"])
    h = ops.local(
        lambda h, bias: F.gelu(h + bias, approximate="tanh"),
        "batch seq mlp, mlp -> batch seq mlp", h, params["up"]["bias"],
    )  # fmt: skip
    h = ops.einsum("batch seq mlp, embed mlp -> batch seq embed", h, params["down"]["weight"])
    return _bias(ops, ops.constrain(h, "batch res_seq embed"), params["down"]["bias"])


def head(params: dict, x: Tensor, ops: Ops) -> Tensor:
    """Normalise and project to logits [batch, seq, vocab]."""
    h = ops.constrain(ops.layer_norm(x, **params["norm"]), "batch seq embed")
    return ops.einsum("batch seq embed, vocab embed -> batch seq vocab", h, params["unembed"])


def _linear(ops: Ops, h: Tensor, params: dict, out: str, axes: str) -> Tensor:
    """Project to heads and add a bias whose seq dim is missing."""
    h = ops.einsum(f"batch seq embed, embed {axes} -> batch {out}", h, params["weight"])
    return ops.local(lambda h, b: h + b.unsqueeze(-2), f"batch {out}, {axes} -> batch {out}", h, params["bias"])


def _bias(ops: Ops, h: Tensor, bias: Tensor) -> Tensor:
    return ops.local(torch.add, "batch res_seq embed, embed -> batch res_seq embed", h, bias)


def _add(ops: Ops, x: Tensor, h: Tensor, site: str) -> Tensor:
    return ops.add(x, ops.dropout(h, "batch res_seq embed", site))


MODEL = Model(
    specs,
    embed,
    block,
    head,
    defaults={"tied": True},
    sizes={  # Radford et al. 2019, table 2
        "gpt2": {"layers": 12, "embed": 768, "heads": 12, "vocab": 50257, "seq": 1024},
        "gpt2-medium": {"layers": 24, "embed": 1024, "heads": 16, "vocab": 50257, "seq": 1024},
        "gpt2-large": {"layers": 36, "embed": 1280, "heads": 20, "vocab": 50257, "seq": 1024},
        "gpt2-xl": {"layers": 48, "embed": 1600, "heads": 25, "vocab": 50257, "seq": 1024},
    },
)
