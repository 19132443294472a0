"""Layers are dealt to stages, each once, so that the dearest stage costs as little as can be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtengine.pipeline.partition import deal, parse_layers

COSTS = st.lists(st.floats(0.1, 9), max_size=7)


@given(COSTS, st.integers(1, 5), st.floats(0, 9), st.floats(0, 9))
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[float], stages: int, first: float, last: float) -> None:
    """Of all ways to cut, none has a cheaper dearest stage; every layer is dealt."""

    def dearest(layers: tuple[int, ...]) -> float:
        ends = [0, *itertools.accumulate(layers)]
        own = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        own[0] += first
        own[-1] += last
        return max(own)

    layers = deal(costs, stages, first, last)
    assert len(layers) == stages and sum(layers) == len(costs) and min(layers) >= 0
    cuts = itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1)
    each = (tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)
    assert dearest(layers) <= min(map(dearest, each)) + 1e-9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2,x", "not whole numbers"),
        ("2,-1", "not whole numbers"),
        ("4", "1 numbers for 2 stages"),
        ("2,1", "3 layers, the"),
    ],
)
def test_wrong_cuts_are_refused(text: str, said: str) -> None:
    """A cut by hand is whole numbers, one for each stage, of as many layers as there are."""
    with pytest.raises(ValueError, match=f"--stage-layers {text}: .*{said}"):
        parse_layers(text, 4, 2)
    assert parse_layers(" 0, 4", 4, 2) == (0, 4)
