"""GPT-2 and Llama in plain torch, from the published architectures: an outside check of models/ and dtengine.ops.

Written apart from models/: explicit scores, masks and softmax, repeated key heads, rotation by complex numbers. Both
take dtengine's parameters ({dotted name: tensor}) and give the logits on one device.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Params = Mapping[str, Tensor]


def gpt(params: Params, tokens: Tensor) -> Tensor:
    """Return the logits [batch, seq, vocab] of GPT-2 (Radford et al. 2019; layer norm before each sub-layer)."""
    table = params["embed.table"]
    x = table[tokens] + params["embed.positions"][: tokens.shape[1]]
    for i in range(_layers(params)):
        at = f"blocks.{i}.attention"
        h = _layer_norm(x, params[f"{at}.norm.weight"], params[f"{at}.norm.bias"])
        q, k, v = (_heads(h, params[f"{at}.{n}.weight"]) + _row(params[f"{at}.{n}.bias"]) for n in "qkv")
        h = _attend(q, k, v)
        x = x + h @ params[f"{at}.out.weight"].flatten(1).T + params[f"{at}.out.bias"]

        at = f"blocks.{i}.mlp"
        h = _layer_norm(x, params[f"{at}.norm.weight"], params[f"{at}.norm.bias"])
        h = h @ params[f"{at}.up.weight"] + params[f"{at}.up.bias"]
        # Hendrycks & Gimpel 2016, the tanh form that GPT-2 was trained with
        h = h / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ params[f"{at}.down.weight"].T + params[f"{at}.down.bias"]
    x = _layer_norm(x, params["head.norm.weight"], params["head.norm.bias"])
    return x @ params.get("head.unembed", table).T


def llama(params: Params, tokens: Tensor) -> Tensor:
    """Return the logits [batch, seq, vocab] of Llama 3 (Touvron et al. 2023; Dubey et al. 2024)."""
    x = params["embed.table"][tokens]
    for i in range(_layers(params)):
        at = f"blocks.{i}.attention"
        h = _rms_norm(x, params[f"{at}.norm"])
        q, k, v = (_heads(h, params[f"{at}.{n}"]) for n in "qkv")
        x = x + _attend(_rotate(q), _rotate(k), v) @ params[f"{at}.out"].flatten(1).T

        at = f"blocks.{i}.mlp"
        h = _rms_norm(x, params[f"{at}.norm"])
        gate = h @ params[f"{at}.gate"]
        x = x + (gate * torch.sigmoid(gate) * (h @ params[f"{at}.up"])) @ params[f"{at}.down"].T
    return _rms_norm(x, params["head.norm"]) @ params.get("head.unembed", params["embed.table"]).T


def loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of weighted token losses, sum of weights) over the targets that are not negative."""
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().clamp(min=-1), ignore_index=-1, reduction="none"
    )
    counted = weights.flatten() * (targets.flatten() >= 0)
    return flat @ counted.to(flat.dtype), counted.sum()


def _layers(params: Params) -> int:
    return 1 + max(int(name.split(".")[1]) for name in params if name.startswith("blocks."))


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) + bias


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)


def _heads(h: Tensor, weight: Tensor) -> Tensor:
    """Project [batch, seq, embed] to [batch, heads, seq, head_dim]; query heads of one key head stand together."""
    made = h @ weight.flatten(1)
    return made.unflatten(-1, (-1, weight.shape[-1])).transpose(1, 2)


def _row(bias: Tensor) -> Tensor:
    """Turn a bias [..., head_dim] into [heads, 1, head_dim]."""
    return bias.reshape(-1, 1, bias.shape[-1])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention (Vaswani et al. 2017): [batch, heads, seq, head_dim] -> [batch, seq, heads x head_dim]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seq = q.shape[-2]
    later = torch.arange(seq).unsqueeze(0) > torch.arange(seq).unsqueeze(1)
    probabilities = torch.softmax(scores.masked_fill(later, -math.inf), -1)
    return (probabilities @ v).transpose(1, 2).flatten(2)


def _rotate(x: Tensor, theta: float = 500_000.0) -> Tensor:
    """Rotary positions (Su et al. 2021): dims i and i + head_dim/2 are one complex number, turned by position."""
    real, imaginary = x.chunk(2, -1)
    frequency = theta ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequency)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)
