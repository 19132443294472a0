"""MLP language model with batch normalisation: each token sees the last few tokens, and no attention.

Sources: Bengio et al., "A Neural Probabilistic Language Model", 2003 (the embeddings of the last tokens into one tanh
layer; without its direct connections); Ioffe & Szegedy, "Batch Normalization", 2015 (before the tanh, and in front of each
residual block and the output). While it trains, statistics of a microbatch mix its tokens, later ones included; evaluation
uses the running statistics and is causal.
"""

import math

import torch.nn.functional as F
from torch import Tensor

from dtengine.data import Batch
from dtengine.model import Buffer, Model, ModelConfig, Param, Tied
from dtengine.ops import Ops

CONTEXT = 4  # tokens that a position sees, its own included


def specs(config: ModelConfig) -> dict:
    """Describe the parameters; matrices start at 1/sqrt(inputs), the output at a tenth of that: nearly even odds."""
    embed, mlp = config.embed, config.mlp
    table = Param("vocab embed", (config.vocab, embed), 1.0)
    into = Param("embed mlp", (embed, mlp), 1 / math.sqrt(embed))
    out = Param("embed mlp", (embed, mlp), 1 / math.sqrt(mlp))
    return {
        "embed": {"table": table, "taps": [into] * CONTEXT, "norm": norm_specs("mlp", mlp), "out": out},
        "blocks": [{"norm": norm_specs("embed", embed), "up": into, "down": out}] * config.layers,
        "head": {
            "norm": norm_specs("embed", embed),
            "unembed": Tied("embed.table")
            if config.tied
            else Param("vocab embed", (config.vocab, embed), 0.1 / math.sqrt(embed)),
        },
    }


def norm_specs(axis: str, size: int) -> dict:
    """Describe a batch normalisation: what it learns, and its running statistics."""
    return {
        "weight": Param(axis, (size,), mean=1.0),
        "bias": Param(axis, (size,)),
        "mean": Buffer(axis, (size,)),
        "variance": Buffer(axis, (size,), 1.0),
    }


def embed(params: dict, batch: Batch, ops: Ops) -> tuple[Tensor, dict]:
    """Look the last tokens up and put them through one tanh layer: [batch, res_seq, embed].

    Collectives:
        Over tp: forward two all-reduces (with sequence parallel two reduce-scatters and one all-gather).
    """
    e = ops.constrain(ops.embedding(params["table"], batch.tokens), "batch seq embed")
    h = None
    for back, tap in enumerate(params["taps"]):
        seen = ops.local(lambda e, back=back: shift(e, back), "batch seq embed -> batch seq embed", e, whole="seq")
        one = ops.einsum("batch seq embed, embed mlp -> batch seq mlp", seen, tap)
        h = one if h is None else ops.add(h, one, "batch seq mlp")
    assert h is not None
    h, norm = ops.batch_norm(h, **params["norm"], axes="batch seq mlp")
    x = ops.einsum("batch seq mlp, embed mlp -> batch seq embed", ops.local(F.tanh, HIDDEN, h), params["out"])
    x = ops.constrain(x, "batch res_seq embed")
    return ops.dropout(x, "batch res_seq embed", "embed"), {"norm": norm}


HIDDEN = "batch seq mlp -> batch seq mlp"


def shift(x: Tensor, back: int) -> Tensor:
    """Give each position of [batch, seq, embed] what stands so far before it; zeros where nothing does."""
    return F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]


def block(params: dict, x: Tensor, ops: Ops) -> tuple[Tensor, dict]:
    """Add batch norm, linear, ReLU, linear to the residual stream [batch, res_seq, embed].

    Collectives:
        Over tp: forward one all-reduce (with sequence parallel one all-gather and one reduce-scatter); backward the
        same. Over the axes that split batch or sequence: one all-reduce each way, of the statistics.
    """
    h, norm = ops.batch_norm(x, **params["norm"])
    h = ops.einsum("batch seq embed, embed mlp -> batch seq mlp", ops.constrain(h, "batch seq embed"), params["up"])
    h = ops.einsum("batch seq mlp, embed mlp -> batch seq embed", ops.local(F.relu, HIDDEN, h), params["down"])
    h = ops.dropout(ops.constrain(h, "batch res_seq embed"), "batch res_seq embed", "mlp")
    return ops.add(x, h), {"norm": norm}


def head(params: dict, x: Tensor, ops: Ops) -> tuple[Tensor, dict]:
    """Normalise and project to logits [batch, seq, vocab]."""
    h, norm = ops.batch_norm(x, **params["norm"])
    h = ops.constrain(h, "batch seq embed")
    return ops.einsum("batch seq embed, vocab embed -> batch seq vocab", h, params["unembed"]), {"norm": norm}


MODEL = Model(specs, embed, block, head, defaults={"heads": 1, "kv_heads": 1, "tied": False})
