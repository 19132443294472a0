"""What a block's forward keeps for its backward, and what the backward computes again.

All decisions are made on the block's own graph: bytes from the shapes of its values, work from its operations. Whatever is
chosen, the same operations run on the same bits, so gradients do not change by a bit.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from dtengine.nodes import is_collective, is_mutable, root_of
from dtengine.parts import Part
from dtengine.torch_private import WAIT, onednn_matmul

aten = torch.ops.aten
MODES = "none, full, selective, or every-N (every N-th block in full)"
FLOPS_A_BYTE = 50.0  # arithmetic that takes as long as moving one byte of memory; GPUs and CPUs lie between 20 and 300
COLLECTIVE = 20.0  # times the price of moving its bytes in memory


@dataclass(frozen=True)
class Saving:
    """What is kept.

    Attributes:
        mode: "none" keeps all that the backward reads; "full" keeps a block's input; "selective" keeps the results of
            matrix products, attention and collectives; "every-N" is "full" for every N-th block.
        budget: share of what "none" keeps that is kept, chosen by bytes saved for work repeated; None for no bound.
        save: of the parts that these leave alone: "all" keeps all that the backward reads; "min-cut" the fewest bytes
            from which cheap operations give the rest.
    """

    mode: str = "none"
    budget: float | None = None
    save: str = "all"

    def policy(self, part: Part) -> str | None:
        """Return "full", "selective", "budget" or "min-cut"; None where a part's backward computes nothing again."""
        rest = None if self.save == "all" else self.save
        if part.role != "block":
            return rest
        if self.budget is not None:
            return "budget"
        if self.mode.startswith("every-"):
            return "full" if (int(part.name.rpartition(".")[2]) + 1) % int(self.mode[6:]) == 0 else rest
        return rest if self.mode == "none" else self.mode


def parse_saving(mode: str, budget: float | None, save: str = "all") -> Saving:
    """Check ``--recompute``, ``--activation-budget`` and ``--save``.

    Raises:
        ValueError: no such mode, a budget outside 0 to 1, or both.
    """
    if save not in ("all", "min-cut"):
        raise ValueError(f"--save {save}: no such way. Use all or min-cut.")
    number = mode[6:] if mode.startswith("every-") else ""
    if mode not in ("none", "full", "selective") and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ValueError(f"--recompute {mode}: no such mode. Use {MODES}.")
    if budget is not None and not (math.isfinite(budget) and 0 <= budget <= 1):
        raise ValueError(f"--activation-budget {budget}: a share of the activations, from 0 to 1. Use 0.6.")
    if budget is not None and mode != "none":
        raise ValueError(
            f"--activation-budget {budget} --recompute {mode}: the budget chooses itself what to repeat. Give one."
        )
    return Saving(mode, budget, save)


def saved_nodes(
    forward: Sequence[fx.Node],
    wanted: set[fx.Node],
    params: set[fx.Node],
    policy: str | None,
    budget: float | None,
    regathered: bool,
) -> set[fx.Node]:
    """Choose what the backward reads as the forward left it.

    Args:
        forward: nodes of the forward, in order.
        wanted: those that the backward reads.
        params: inputs that are parameters.
        policy: what is kept, as ``Saving.policy``; None for all that need not be made from parameters alone.
        budget: of the policy "budget".
        regathered: whether parameters are gathered again: then nothing that shares their memory is kept.

    Returns:
        Nodes of the forward whose values are kept.
    """
    of_params: set[fx.Node] = set(params)
    for node in forward:
        if node.op == "call_function" and node.all_input_nodes and all(n in of_params for n in node.all_input_nodes):
            of_params.add(node)
    changed = {
        root_of(a) for n in forward if is_mutable(n) and not is_collective(n) for a in n.all_input_nodes
    }  # in place: to run such an operation twice would need its target as it was
    pinned = {n for n in forward if root_of(n) in changed}
    free = of_params if regathered else set()
    if policy is None:
        return {n for n in forward if n not in free} | pinned
    if policy == "budget":
        assert budget is not None
        return _within_budget(forward, wanted - of_params, budget) | pinned
    if policy == "min-cut":
        return _min_cut(forward, wanted - of_params, of_params, changed) | pinned
    if policy == "selective":
        return {n for n in forward if n not in free and _is_dear(root_of(n))} | pinned
    return pinned


def _min_cut(
    forward: Sequence[fx.Node], wanted: set[fx.Node], of_params: set[fx.Node], pinned: set[fx.Node]
) -> set[fx.Node]:
    """Choose the fewest bytes from which cheap operations compute all that is wanted.

    A minimum cut between what cannot be computed again (dear operations, the part's input) and what the backward reads:
    each value is an edge of as many bytes, each operation leads from its operands to its result. What is made from
    parameters alone is there anyway. Source: Chen et al. 2016, arXiv:1604.06174, asks which values to keep; that it is a
    minimum cut where some operations are free to repeat is how torch's own partitioner sees it, too.
    """
    import networkx  # here: a start without it is a quarter of a second shorter

    flow = networkx.DiGraph()
    begin, end = "begin", "end"
    read = {root_of(n) for n in wanted}
    flow.add_node(begin)
    for node in forward:
        if node.op != "call_function" or root_of(node) is not node or node in of_params:
            continue
        kept = isinstance(node.meta.get("val"), Tensor) or node in read  # of several results each is kept by itself
        flow.add_edge((node, "in"), (node, "out"), **({"capacity": _bytes(node)} if kept else {}))
        if node in pinned or _is_dear(node):
            flow.add_edge(begin, (node, "in"))
        for operand in {root_of(a) for a in node.all_input_nodes} - of_params:
            if operand.op == "placeholder":
                flow.add_edge(begin, (operand, "in"))
                flow.add_edge((operand, "in"), (operand, "out"), capacity=_bytes(operand))
            flow.add_edge((operand, "out"), (node, "in"))
    for node in read:
        if (node, "out") in flow:
            flow.add_edge((node, "out"), end)
    if end not in flow:
        return set()
    _, (before, _) = networkx.minimum_cut(flow, begin, end)
    return {n for n in forward if (root_of(n), "in") in before and (root_of(n), "out") not in before}


def _is_dear(node: fx.Node) -> bool:
    """Whether a value is dear to compute again: products, attention, collectives."""
    if node.target is operator.getitem:
        return _is_dear(node.args[0])  # type: ignore[arg-type]
    name = str(node.target)
    products = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, onednn_matmul)
    # The operand of a collective in place becomes its result.
    sent = is_collective(node) or any(is_collective(user) for user in node.users)
    return node.target in products or "attention" in name or sent or node.target is WAIT


def _within_budget(forward: Sequence[fx.Node], wanted: set[fx.Node], budget: float) -> set[fx.Node]:
    """Drop saved values, cheapest work for their bytes first, until the rest is within the budget."""
    roots = {r for r in map(root_of, wanted) if r.op == "call_function"}
    kept = set(roots)
    sizes = {r: _bytes(r) for r in roots}
    target = budget * sum(sizes.values())
    while kept and sum(sizes[r] for r in kept) > target:
        prices = {r: _price(r, kept - {r}) / max(sizes[r], 1) for r in kept if sizes[r]}
        if not prices:
            break
        kept.remove(min(prices, key=lambda r: (prices[r], r.name)))
    return {n for n in forward if root_of(n) in kept}


def _price(root: fx.Node, kept: Iterable[fx.Node]) -> float:
    """Return the work of computing a value again from what is kept, in bytes moved."""
    known, todo, seen, price = set(kept), [root], set(), 0.0
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function" or root_of(node) in known:
            continue
        seen.add(node)
        price += work_of(node)
        todo += node.all_input_nodes
    return price


def work_of(node: fx.Node) -> float:
    """Estimate the work of an operation, as bytes moved in memory."""
    value = node.meta.get("val")
    operands = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if is_collective(node):
        return COLLECTIVE * sum(_nbytes(t) for t in operands)
    if node is not root_of(node) or not operands:
        return 0.0
    moved = float(_bytes(node) + sum(_nbytes(t) for t in operands))
    if _is_product(node) and isinstance(value, Tensor):
        return moved + 2.0 * value.numel() * operands[0].shape[-1] / FLOPS_A_BYTE
    if "attention" in str(node.target):
        q, k = operands[0], operands[1]
        return moved + 4.0 * q.numel() * k.shape[-2] / FLOPS_A_BYTE
    return moved


def _is_product(node: fx.Node) -> bool:
    return node.target in (aten.mm.default, aten.bmm.default, aten.addmm.default, onednn_matmul)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return _nbytes(value)
    return sum(_nbytes(v) for v in value if isinstance(v, Tensor)) if isinstance(value, list | tuple) else 0


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
