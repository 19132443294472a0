"""Layouts: rules fire in order, every other rule says why, and shards tile tensors exactly as DTensor cuts them."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # what every DTensor is cut by

from dtengine.layout import (
    LOGICAL_AXES,
    MESH_AXES,
    PLANS,
    Layout,
    Rule,
    axes_of,
    chunk_bounds,
    local_bounds,
    make_plan,
)
from dtengine.torch_private import fake_process_group

AXES = st.lists(st.sampled_from(LOGICAL_AXES), max_size=5, unique=True).map(tuple)
PARAM_AXES = AXES.filter(lambda axes: not {"batch", "seq", "res_seq"} & set(axes))
HEADS = st.fixed_dictionaries({"kv_heads": st.integers(1, 12), "q_per_kv": st.integers(1, 6)})
RULES = st.builds(Rule, st.sampled_from(LOGICAL_AXES), st.sampled_from(MESH_AXES))
LAYOUTS = st.lists(RULES, max_size=8).map(lambda rules: Layout("drawn", tuple(rules)))


@st.composite
def meshes(draw, names=MESH_AXES, largest=5):
    """Draw {mesh axis: size}, in mesh order."""
    chosen = draw(st.sets(st.sampled_from(names), min_size=1))
    return {m: draw(st.integers(1, largest)) for m in names if m in chosen}


@st.composite
def shardings(draw):
    """Draw (shape, placements, mesh sizes); several mesh axes may split one dim."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placement = st.none() | st.integers(0, len(shape) - 1)
    drawn = [draw(placement) for _ in sizes]
    return shape, tuple(Replicate() if d is None else Shard(d) for d in drawn), sizes


# Rules


def test_axes_of_splits_names_on_blanks():
    """A tensor's axes are written as one text, one name for each dim; a scalar has none."""
    assert axes_of("batch  seq embed") == ("batch", "seq", "embed")
    assert axes_of("") == ()


@given(LAYOUTS, AXES, meshes())
@settings(deadline=None)
def test_a_rule_fires_only_where_it_can_and_once_for_each_mesh_axis(layout, axes, mesh):
    """A rule that fires names a dim of the tensor and a mesh axis of more than one rank, which no other rule took."""
    taken, decisions = layout.decide(axes, mesh)
    fired = [d.rule for d in decisions if not d.reason]
    assert all(rule.logical in axes and mesh.get(rule.mesh_axis, 1) > 1 for rule in fired)
    assert len({rule.mesh_axis for rule in fired}) == len(fired)
    assert taken == {rule.mesh_axis: rule.logical for rule in fired}


@given(LAYOUTS, AXES, meshes())
@settings(deadline=None)
def test_every_rule_is_decided_in_order_and_the_reason_of_one_that_did_not_fire_is_true(layout, axes, mesh):
    """There is one decision for each rule, in order; a rule is skipped for what is so, given the rules before it."""
    _, decisions = layout.decide(axes, mesh)
    assert tuple(d.rule for d in decisions) == layout.rules
    order = list(mesh)
    before: list[Rule] = []
    for (logical, mesh_axis), reason in decisions:
        if reason == "":
            before.append(Rule(logical, mesh_axis))
        elif reason == f"{mesh_axis} has size 1":
            assert mesh.get(mesh_axis, 1) == 1
        elif reason == f"no {logical} dim":
            assert logical not in axes
        elif found := re.fullmatch(rf"{mesh_axis} taken by (\w+)", reason):
            assert Rule(found[1], mesh_axis) in before
        else:
            found = re.fullmatch(rf"{logical} taken by ([\w, ]+)", reason)
            assert found, reason
            holders = found[1].split(", ")
            assert holders == [rule.mesh_axis for rule in before if rule.logical == logical]
            assert max(order.index(m) for m in holders) > order.index(mesh_axis)


@given(LAYOUTS, AXES, meshes())
@settings(deadline=None)
def test_placements_agree_with_decide(layout, axes, mesh):
    """A tensor is Shard(dim) exactly on the mesh axes that a rule took, in mesh order, and Replicate on the others."""
    taken, _ = layout.decide(axes, mesh)
    placements = layout.placements(axes, mesh)
    assert len(placements) == len(mesh)
    for mesh_axis, placement in zip(mesh, placements, strict=True):
        assert placement == (Shard(axes.index(taken[mesh_axis])) if mesh_axis in taken else Replicate())


def test_the_first_rule_wins_and_the_others_say_who_was_first():
    """Of two rules for one mesh axis the first fires; the order of rules is the order of preference."""
    mesh = {"dp": 2, "tp": 4}
    layout = Layout("stored", (Rule("mlp", "tp"), Rule("vocab", "tp"), Rule("embed", "dp"), Rule("vocab", "rep")))
    taken, decisions = layout.decide(("vocab", "mlp"), mesh)
    assert taken == {"tp": "mlp"}
    assert [d.reason for d in decisions] == ["", "tp taken by mlp", "no embed dim", "rep has size 1"]


def test_the_outer_mesh_axis_splits_a_dim_first():
    """A dim that several mesh axes split is split by the outer one first; the other order is refused with its reason."""
    mesh = {"rep": 2, "dp": 2, "tp": 2}
    outer_first = Layout("a", (Rule("batch", "rep"), Rule("batch", "dp")))
    inner_first = Layout("b", (Rule("batch", "tp"), Rule("batch", "dp"), Rule("batch", "rep")))
    assert outer_first.placements(("batch",), mesh) == (Shard(0), Shard(0), Replicate())
    taken, decisions = inner_first.decide(("batch",), mesh)
    assert taken == {"tp": "batch"}
    assert [d.reason for d in decisions] == ["", "batch taken by tp", "batch taken by tp"]


def test_unknown_and_repeated_axes_are_errors():
    """An axis that a layout does not know would be replicated silently, so it is refused, and every one is named."""
    layout = Layout("params", (Rule("mlp", "tp"),), frozenset(["batch", "mlp"]))
    for call in (layout.check, lambda axes: layout.decide(axes, {"tp": 2}), lambda a: layout.placements(a, {"tp": 2})):
        with pytest.raises(ValueError) as error:
            call(("batch", "channels", "height"))
        assert str(error.value) == (
            "axes 'batch channels height': channels, height is in no rule of layout params; every logical axis must be "
            "known, else it would be replicated silently. Use one of batch, mlp, or list it in the model's `whole_axes`."
        )
        with pytest.raises(ValueError) as error:
            call(("mlp", "mlp"))
        assert str(error.value) == "axes 'mlp mlp': an axis occurs twice; each dim needs an axis of its own."


# Shards


@given(st.integers(0, 200), st.integers(1, 40))
@settings(deadline=None)
def test_chunk_bounds_agree_with_torch_chunk(size, parts):
    """A dim is cut as torch.chunk cuts it; where torch gives fewer chunks the missing ones are empty, at the end."""
    chunks = [c.tolist() for c in torch.arange(size).chunk(parts)]
    chunks += [[]] * (parts - len(chunks))
    assert [list(range(*chunk_bounds(size, parts, i))) for i in range(parts)] == chunks
    assert all(0 <= start <= stop <= size for start, stop in (chunk_bounds(size, parts, i) for i in range(parts)))


@given(shardings())
@settings(deadline=None)
@example(((1, 0), (Shard(0), Shard(1), Shard(0)), (3, 2, 2)))
@example(((10,), (Shard(0), Shard(0)), (4, 3)))
def test_local_bounds_agree_with_dtensor(drawn):
    """Every rank's shape and offset are DTensor's own, for any sizes, empty shards and dims that several axes split."""
    shape, placements, sizes = drawn
    for coordinate in itertools.product(*map(range, sizes)):
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
        bounds = local_bounds(shape, placements, sizes, coordinate)
        assert tuple(stop - start for start, stop in bounds) == tuple(local)
        if math.prod(local):  # of an empty shard only the shape means something
            assert tuple(start for start, _ in bounds) == tuple(offset)


def test_local_bounds_agree_with_a_dtensor_that_torch_distributes():
    """On a mesh of 12 ranks the shard that torch.distributed.tensor makes has the shape that local_bounds gives."""
    with fake_process_group(12):
        mesh = init_device_mesh("cpu", (3, 2, 2), mesh_dim_names=("rep", "dp", "tp"))
        for shape, dims in itertools.product(((7, 5), (1, 4), (0, 3)), itertools.product((0, 1, None), repeat=3)):
            placements = tuple(Replicate() if d is None else Shard(d) for d in dims)
            made = zeros(*shape, device_mesh=mesh, placements=placements)
            assert isinstance(made, DTensor)
            bounds = local_bounds(shape, placements, (3, 2, 2), (0, 0, 0))
            assert tuple(made.to_local().shape) == tuple(stop - start for start, stop in bounds)


@given(shardings())
@settings(deadline=None)
def test_shards_of_all_ranks_tile_the_tensor_once_for_each_replica(drawn):
    """Every element is on exactly one rank of each set of ranks that replicate nothing between them."""
    shape, placements, sizes = drawn
    held = np.zeros(shape, int)
    for coordinate in itertools.product(*map(range, sizes)):
        held[tuple(slice(*b) for b in local_bounds(shape, placements, sizes, coordinate))] += 1
    replicas = math.prod(s for s, p in zip(sizes, placements, strict=True) if p == Replicate())
    assert (held == replicas).all()


@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4))
def test_pieces_of_a_dim_split_by_rep_and_dp_stand_in_rank_order(size, rep, dp):
    """Gathering over dp, then rep, needs no permutation: pieces follow each other in rank order."""
    placements = (Shard(0), Shard(0))
    ranks = itertools.product(range(rep), range(dp))
    rows = [i for at in ranks for i in range(*local_bounds((size,), placements, (rep, dp), at)[0])]
    assert rows == list(range(size))


# Plans


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_each_row_of_the_table_splits_over_dp_what_it_says(plan, sp):
    """ddp splits nothing over dp, zero1 the optimizer state, zero2 also gradients, fsdp also parameters; all split the
    batch over rep and dp, and sequence parallel splits the residual stream over tp."""
    expected = {
        "ddp": set(),
        "zero1": {"optimizer"},
        "zero2": {"optimizer", "grads"},
        "fsdp": {"optimizer", "grads", "params"},
    }[plan]
    mesh = {"rep": 2, "dp": 3, "tp": 2}
    made = make_plan(plan, mesh, {"kv_heads": 4, "q_per_kv": 2}, sequence_parallel=sp)
    stored = {"params": made.params, "grads": made.grads, "optimizer": made.optimizer}
    for name, layout in stored.items():
        assert layout.name == name
        dp = Shard(0) if name in expected else Replicate()
        assert layout.placements(axes_of("embed mlp"), mesh) == (Replicate(), dp, Shard(1))
        assert layout.placements(axes_of("embed kv_heads q_per_kv head_dim"), mesh) == (Replicate(), dp, Shard(1))
        assert layout.placements(axes_of("vocab embed"), mesh)[2] == Shard(0)
        assert layout.placements(("embed",), mesh) == (Replicate(), dp, Replicate())
    compute = made.compute.placements
    assert compute(axes_of("embed mlp"), mesh) == (Replicate(), Replicate(), Shard(1))
    assert compute(axes_of("batch seq embed"), mesh) == (Shard(0), Shard(0), Replicate())
    assert compute(axes_of("batch res_seq embed"), mesh) == (Shard(0), Shard(0), Shard(1) if sp else Replicate())
    assert compute(axes_of("batch seq vocab"), mesh) == (Shard(0), Shard(0), Shard(2))


@given(meshes(("rep", "dp", "tp")), HEADS, PARAM_AXES)
@settings(deadline=None)
def test_rows_of_the_table_are_nested(mesh, heads, axes):
    """ddp ⊂ zero1 ⊂ zero2 ⊂ fsdp: each row splits one layout more over dp than the row before, on the same dim, and
    is equal to it in all else."""
    split = []
    for name in ("ddp", "zero1", "zero2", "fsdp"):
        row = make_plan(name, mesh, heads)
        laid = [layout.decide(axes, mesh)[0] for layout in (row.params, row.grads, row.optimizer)]
        assert len({tuple((m, a) for m, a in taken.items() if m != "dp") for taken in laid}) == 1
        split.append([taken.get("dp") for taken in laid])
    dim = split[3][2]  # what dp splits of this tensor, None where it has nothing to split
    assert split == [[None, None, None], [None, None, dim], [None, dim, dim], [dim, dim, dim]]


@given(st.sampled_from(sorted(PLANS)), meshes(("rep", "dp", "tp")), HEADS, PARAM_AXES)
@settings(deadline=None)
def test_a_parameter_moves_over_dp_only_and_never_shares_a_dim_with_tp(name, mesh, heads, axes):
    """dp and tp lie on different dims of a parameter, rep splits none, and the compute layout differs in dp alone:
    then moving a parameter is one gather over dp."""
    plan = make_plan(name, mesh, heads)
    compute, _ = plan.compute.decide(axes, mesh)
    for layout in (plan.params, plan.grads, plan.optimizer):
        taken, _ = layout.decide(axes, mesh)
        assert taken.get("dp") is None or taken["dp"] != taken.get("tp")
        assert {m: a for m, a in taken.items() if m != "dp"} == compute
        assert not {"rep", "dp"} & set(compute)


@pytest.mark.parametrize(
    ("axes", "takes"),
    [
        ("embed", "embed"),
        ("vocab embed", "embed"),
        ("mlp", None),  # a bias over mlp: tp has the only dim
        ("kv_heads head_dim", "head_dim"),
        ("kv_heads q_per_kv head_dim", "head_dim"),
        ("positions embed", "embed"),
        ("positions", "positions"),
        ("kv_heads", None),
        ("seq", None),
    ],
)
def test_a_parameter_without_embed_falls_to_the_next_axis(axes, takes):
    """Where a parameter has no embed dim, dp takes head_dim, mlp, vocab, positions or kv_heads, if tp left it free."""
    plan = make_plan("fsdp", {"dp": 2, "tp": 2}, {"kv_heads": 2, "q_per_kv": 1})
    taken, _ = plan.params.decide(axes_of(axes), plan.sizes)
    assert taken.get("dp") == takes


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
@settings(deadline=None)
def test_the_head_rule_keeps_query_heads_with_their_keys(kv_heads, q_per_kv, tp):
    """tp takes kv_heads where there are at least tp of them, else the less uneven axis; either way a rank with a query head
    has its key head."""
    plan = make_plan("fsdp", {"dp": 2, "tp": tp}, {"kv_heads": kv_heads, "q_per_kv": q_per_kv})
    rules = [rule.logical for rule in plan.compute.rules if rule.logical in ("kv_heads", "q_per_kv")]
    busiest = {"kv_heads": -(-kv_heads // tp) * q_per_kv, "q_per_kv": kv_heads * -(-q_per_kv // tp)}
    assert rules == ["kv_heads"] if kv_heads >= tp else busiest[rules[0]] == min(busiest.values())
    q, k = (plan.compute.placements(axes_of(a), plan.sizes) for a in ("kv_heads q_per_kv", "kv_heads"))
    seen = 0
    for at in range(tp):
        mine, groups = local_bounds((kv_heads, q_per_kv), q, (2, tp), (0, at))
        (keys,) = local_bounds((kv_heads,), k, (2, tp), (0, at))
        assert keys == mine
        seen += (mine[1] - mine[0]) * (groups[1] - groups[0])
    assert seen == kv_heads * q_per_kv


def test_plan_properties():
    """A plan knows its sizes, ranks and data-parallel coordinates, and prints its mesh as a person may type it."""
    plan = make_plan("fsdp", {"rep": 2, "dp": 3, "tp": 4}, {})
    assert (plan.name, plan.num_ranks, plan.coordinates) == ("fsdp", 24, 6)
    assert plan.sizes == {"rep": 2, "dp": 3, "tp": 4}
    assert plan.data_axes == ("rep", "dp")
    assert plan.mesh_text() == "rep=2,dp=3,tp=4"
    assert make_plan("ddp", {"tp": 4}, {}).coordinates == 1


def test_whole_axes_are_known_and_never_split():
    """Axes of a person's own model are legal once listed, and no rule of any layout splits them."""
    plan = make_plan("fsdp", {"dp": 2, "tp": 2}, {}, whole_axes=["channels"])
    for layout in (plan.params, plan.grads, plan.optimizer, plan.compute):
        assert layout.placements(("channels",), plan.sizes) == (Replicate(), Replicate())


def test_an_unknown_plan_is_an_error():
    """A name that is no row of the table is refused with the names that are."""
    with pytest.raises(ValueError) as error:
        make_plan("zero3", {"dp": 2}, {})
    assert str(error.value) == "--plan zero3: no such plan. A plan is one of ddp, zero1, zero2, fsdp."
