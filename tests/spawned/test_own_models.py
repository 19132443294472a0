"""A person's own model, in legal but unusual ways: it computes what one device computes, or is refused by name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_cases import case
from test_equivalence import check_equal
from torch import Tensor

from dtengine import Model, Ops, Param, configure
from dtengine.data import Batch
from dtengine.model import forward, parameters
from dtengine.models import llama
from dtengine.parameters import init_param

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

RES = "batch res_seq embed"
SIZES: dict[str, Any] = {
    "layers": 2,
    "embed": 30,
    "heads": 3,
    "kv_heads": 3,
    "head_dim": 2,
    "mlp": 26,
    "vocab": 67,
    "seq": 15,
}
RUN = {**SIZES, "dropout": 0.0, "global_batch": 7, "microbatches": 2, "steps": 3, "lr": 1.0, "clip": 0.1}


def _specs(config: Any) -> dict[str, Any]:
    specs = llama.specs(config)
    pair = {"a": Param("embed", (config.embed,), 0.3), "b": Param("embed", (config.embed,), 0.3)}
    return {**specs, "blocks": [{**block, **pair} for block in specs["blocks"]]}


def _added(params: Any, x: Tensor, ops: Ops) -> Tensor:
    equation = f"{RES}, embed, embed -> {RES}"
    return ops.local(lambda x, a, b: x + (a + b), equation, llama.block(params, x, ops), params["a"], params["b"])


def _masked(params: Any, x: Tensor, ops: Ops) -> Tensor:
    mask = ops.local(lambda x: (x > 0).to(x.dtype), f"{RES} -> {RES}", x)
    return ops.local(torch.mul, f"{RES}, {RES} -> {RES}", _added(params, x, ops), mask)


def _idle(params: Any, x: Tensor, ops: Ops) -> Tensor:
    return x


def _new_axis(params: Any, x: Tensor, ops: Ops) -> Tensor:
    return ops.local(lambda x: x.unflatten(2, (2, -1)), "batch res_seq embed -> batch res_seq two half", x)


def _wrong_shape(params: Any, x: Tensor, ops: Ops) -> Tensor:
    return ops.local(lambda x: x.mean(0, keepdim=True), f"{RES} -> {RES}", x, whole="batch")


MODEL = replace(llama.MODEL, specs=_specs)
ADDED, MASKED, IDLE, NEW_AXIS, WRONG_SHAPE = (
    replace(MODEL, block=block) for block in (_added, _masked, _idle, _new_axis, _wrong_shape)
)


@pytest.mark.parametrize("mesh", ["1", "2", "1x2", "2x2"])
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["ADDED", "MASKED", "IDLE"])
def test_unusual_models_are_exact(pool: Pool, name: str, plan: str, mesh: str) -> None:
    """Two parameters whose gradients are one tensor, a value that cuts the gradient off, a block that uses nothing."""
    check_equal(pool, case({"model": f"{os.path.relpath(__file__)}:{name}"}, mesh, plan, **RUN))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (NEW_AXIS, "ops.local .*: two, half is on no operand; a result has axes of its operands"),
        (WRONG_SHAPE, r"the function returned shape \(1, 15, 30\), its axes say \(7, 15, 30\)"),
    ],
)
def test_results_that_are_not_as_named_are_refused(model: Model, said: str) -> None:
    """A result whose shape is not what its axes say is refused on one device already, by both shapes."""
    config = configure(model, "own", None, **SIZES)
    specs = model.specs(config)
    params = {n: init_param(p, n, 0, [(0, s) for s in p.shape], "cpu") for n, p in parameters(specs).items()}
    tokens = torch.zeros(7, 15, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.ones(7, 15), torch.arange(7))
    with pytest.raises(ValueError, match=said):
        forward(model, specs, params, batch, Ops())
