"""Sample text from a trained state, on one rank."""

import math

import torch
import torch.distributed as dist

from dtengine.config import Setup
from dtengine.data import Batch
from dtengine.mesh import Mesh
from dtengine.model import buffers, forward, parameters
from dtengine.ops import Ops
from dtengine.shard import gather_named
from dtengine.state import State

LARGEST_BYTES = 4 << 30  # parameters above this are not gathered to one rank for a sample


def sample_text(setup: Setup, state: State, mesh: Mesh, length: int, byte_level: bool, seed: int) -> str | None:
    """Sample tokens on rank 0; all ranks call it, since parameters are gathered first.

    Args:
        setup: the model.
        state: its parameters and buffers.
        mesh: of the state.
        length: tokens to sample.
        byte_level: whether tokens are bytes of text; else token ids are returned as numbers.
        seed: of the draws.

    Returns:
        The text on rank 0; None on other ranks, where nothing is asked for, or where the model is too large for one rank.
    """
    held = {**state.params, **state.buffers}
    size = sum(math.prod(p.shape) * p.element_size() for p in held.values())
    if length == 0 or size > LARGEST_BYTES:
        return None
    specs, seq = setup.model.specs(setup.model_config), setup.model_config.seq
    leaves = {**parameters(specs), **buffers(specs)}
    params = gather_named(held, {name: leaf.shape for name, leaf in leaves.items()}, mesh)
    if dist.get_rank() != 0:
        return None
    device = next(iter(params.values())).device
    generator = torch.Generator().manual_seed(seed)
    start = list(b"\ndef ") if byte_level else [0]
    tokens = torch.tensor([start], device=device)
    with torch.inference_mode():
        while tokens.shape[1] < length + len(start):
            window = tokens[:, -seq:]
            batch = Batch(window, window, torch.ones_like(window), torch.zeros(1, dtype=torch.int64, device=device))
            logits = forward(setup.model, specs, params, batch, Ops())[0, -1].double() / 0.8
            chosen = torch.multinomial(torch.softmax(logits, -1).cpu(), 1, generator=generator)
            tokens = torch.cat([tokens, chosen.to(device).view(1, 1)], 1)
    ids = tokens[0].tolist()
    return bytes(min(i, 255) for i in ids).decode("utf-8", "replace") if byte_level else " ".join(map(str, ids))
