"""Which layers a stage has."""

from collections.abc import Sequence
from typing import TypeVar

Part = TypeVar("Part")


def deal(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Deal consecutive layers to stages so that the dearest stage costs as little as can be.

    Args:
        costs: of each layer, in any unit.
        num_stages: at least 1; some stages have no layer where there are more of them than layers.
        first: what the first stage costs besides: the embedding.
        last: what the last stage costs besides: the head and the loss.

    Returns:
        Layers of each stage. Among equals the one whose stages before the last are fuller.
    """
    # best[s][n]: least cost of the dearest of s + 1 stages that have the first n layers; cut[s][n]: those of the first s
    total, sums = len(costs), [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    if num_stages == 1:
        return (total,)
    best = [[first + sums[n] for n in range(total + 1)]]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        extra = last if stage == num_stages - 1 else 0.0
        row, cut = [], []
        for n in range(total + 1):
            options = [(max(best[-1][k], extra + sums[n] - sums[k]), -k) for k in range(n + 1)]
            found = min(options)
            row.append(found[0])
            cut.append(-found[1])
        best.append(row)
        cuts.append(cut)
    ends = [total]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.append(0)
    return tuple(a - b for a, b in zip(ends, ends[1:], strict=False))[::-1]


def cut(parts: Sequence[Part], layers: Sequence[int]) -> list[list[Part]]:
    """Deal embedding, blocks and head, in this order, to stages of so many blocks each."""
    blocks, found = list(parts[1:-1]), []
    for count in layers:
        found.append(blocks[:count])
        blocks = blocks[count:]
    assert not blocks, "the layers of all stages are those of the model"
    found[0].insert(0, parts[0])
    found[-1].append(parts[-1])
    return found


def parse_layers(text: str, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Read ``--stage-layers``: "5,6,6,5".

    Raises:
        ValueError: not whole numbers, another number of stages, or another sum than the model has layers.
    """
    rule = f"Write the layers of each of {num_stages} stages, {num_layers} together"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise ValueError(f"--stage-layers {text[:60]}: not whole numbers by comma. {rule}.")
    layers = tuple(map(int, parts))
    if len(layers) != num_stages:
        raise ValueError(f"--stage-layers {text[:60]}: {len(layers)} numbers for {num_stages} stages. {rule}.")
    if sum(layers) != num_layers:
        raise ValueError(f"--stage-layers {text[:60]}: {sum(layers)} layers, the model has {num_layers}. {rule}.")
    return layers
