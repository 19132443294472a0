"""Any plan on any mesh computes what one device computes: the property, and what it rests on.

Every example is a command line of ``dtengine.verify``, and the ranks run what that command runs; a failing one prints
it. The oracle is untraced torch on one device in float64, one backward over the whole batch.

This file is also a person's own model, OWN_MODEL: ranks load it by path, which is why Hypothesis tests are made inside
functions (Hypothesis refuses a @given that is defined while another runs).
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from dtengine import random
from dtengine.config import Setup, resolve
from dtengine.data import Batch, rows_of
from dtengine.layout import PLANS, axes_of
from dtengine.mesh import Mesh, build_mesh, parse_mesh
from dtengine.model import Model, ModelConfig, Param, Tied, parameters
from dtengine.ops import Ops
from dtengine.optim import sgd
from dtengine.options import BatchOptions, MeshOptions, ModelOptions, parse
from dtengine.parameters import init_param
from dtengine.passes import PASSES
from dtengine.program import Program
from dtengine.shard import gather, wrap
from dtengine.step import Step, init_state
from dtengine.verify import (
    DEFAULTS,
    CheckOptions,
    Report,
    Trained,
    VerifyOptions,
    compare,
    random_batch,
    train_plan,
)

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

SGD = VerifyOptions().optimizer
SMALLEST = "--heads 1 --kv-heads 1 --mlp 1 --vocab 5 --seq 1 --global-batch 1 --microbatches 1"


# --- a model of a person's own: what no built-in model has ----------------------------------------------------------


def _own_specs(config: ModelConfig) -> dict[str, Any]:
    """An axis of its own, a parameter without dims, one that nothing uses, one that all blocks share."""
    table = Param("vocab embed", (config.vocab, config.embed), 0.3)
    block = {
        "taps": Param("taps embed", (3, config.embed), 0.3),
        "up": Param("mlp embed", (config.mlp, config.embed), 0.3),
        "down": Param("mlp embed", (config.mlp, config.embed), 0.3),
        "gain": Param("", (), mean=0.7),
        "unused": Param("mlp", (config.mlp,), 0.3),
    }
    shared = {**block, "up": Tied("blocks.0.up")}
    return {
        "embed": {"table": table},
        "blocks": [block] + [shared] * (config.layers - 1),
        "head": {"unembed": Tied("embed.table") if config.tied else table},
    }


def _own_embed(params: dict[str, Any], batch: Batch, ops: Ops) -> Tensor:
    return ops.dropout(ops.embedding(params["table"], batch.tokens), "batch res_seq embed", "embed")


def _own_block(params: dict[str, Any], x: Tensor, ops: Ops) -> Tensor:
    """A causal convolution along the whole sequence, then an MLP; every tp rank does the convolution."""

    def convolve(x: Tensor, taps: Tensor) -> Tensor:
        return sum((torch.nn.functional.pad(x, (0, 0, i, 0))[:, : x.shape[1]] * t for i, t in enumerate(taps)), x * 0)

    whole = ops.constrain(x, "batch seq embed")
    h = ops.local(convolve, "batch seq embed, taps embed -> batch seq embed", whole, params["taps"], whole="seq")
    up = ops.einsum("batch seq embed, mlp embed -> batch seq mlp", h, params["up"])
    up = ops.local(lambda h, gain: torch.tanh(h) * gain, "batch seq mlp, -> batch seq mlp", up, params["gain"])
    down = ops.einsum("batch seq mlp, mlp embed -> batch seq embed", up, params["down"])
    down = ops.dropout(ops.constrain(down, "batch res_seq embed"), "batch res_seq embed", "mlp")
    return ops.local(torch.add, "batch res_seq embed, batch res_seq embed -> batch res_seq embed", x, down)


def _own_head(params: dict[str, Any], x: Tensor, ops: Ops) -> Tensor:
    x = ops.constrain(x, "batch seq embed")
    return ops.einsum("batch seq embed, vocab embed -> batch seq vocab", x, params["unembed"])


OWN_MODEL = Model(_own_specs, _own_embed, _own_block, _own_head, whole_axes=("taps",))
OWN = f"{os.path.relpath(__file__)}:OWN_MODEL"


# --- what is drawn --------------------------------------------------------------------------------------------------

RANKS = {1: 4, 2: 10, 3: 9, 4: 22, 5: 1, 6: 1, 8: 3}  # {ranks: examples of each plan, of 50}
HEADS = ((6, 3), (6, 1), (6, 2), (6, 6), (4, 4), (4, 1), (8, 4), (5, 5), (2, 1), (1, 1))


def _meshes(num_ranks: int) -> list[str]:
    """All meshes of so many ranks with 1 to 3 of the axes rep, dp and tp, sizes of 1 included."""
    found = []
    for count in (1, 2, 3):
        for axes in itertools.combinations(("dp", "tp", "rep"), count):
            for sizes in itertools.product(range(1, num_ranks + 1), repeat=count):
                if math.prod(sizes) == num_ranks:
                    found.append(",".join(f"{a}={s}" for a, s in zip(axes, sizes, strict=True)))
    return sorted(found, key=lambda mesh: (mesh.count("=1"), -mesh.count("=")))  # Hypothesis draws the first most


CORNERS = (  # heads that tp does not divide, or that are fewer; empty shards everywhere; a person's own model
    "--mesh tp=2 --heads 6 --kv-heads 3 --layers 2 --microbatches 1",
    "--mesh tp=4 --heads 6 --kv-heads 1 --model gpt --layers 2 --microbatches 1",
    "--mesh tp=4 --heads 6 --kv-heads 6 --no-sp --layers 1 --microbatches 3",
    "--mesh 2x4 --heads 6 --kv-heads 2 --layers 1 --microbatches 2 --dropout 0.1",
    f"--mesh rep=2,dp=2,tp=2 --plan zero1 --layers 1 {SMALLEST}",
    "--mesh dp=8 --plan zero1 --layers 1 --embed 3 --global-batch 1 --microbatches 1",  # five ranks own nothing
    "--mesh rep=2,dp=2,tp=2 --model mlp --plan zero1 --layers 1 --global-batch 5 --microbatches 2",  # idle coordinates
    "--mesh dp=4,tp=2 --plan zero1 --no-sp --layers 1 --embed 3 --global-batch 1 --microbatches 1 --bucket-mb 0",
    "--mesh rep=2,dp=2,tp=2 --plan ddp --no-sp --layers 1 --global-batch 3 --microbatches 1 --momentum 0.9",
    # A rank that owns nothing, whose gathers depend on nothing.
    "--mesh dp=4 --plan zero1 --no-sp --model mlp --layers 1 --embed 3 --global-batch 1 --microbatches 1 --bucket-mb 0",
    # Blocks that are traced once on some ranks and twice on others, for their strides.
    "--mesh dp=2,tp=2 --plan ddp --model mlp --layers 2 --global-batch 1 --microbatches 1 --recompute full --bucket-mb 0",
    f"--mesh dp=2,tp=2 --model {OWN} --plan zero2 --layers 2 --weights --dropout 0.2 --microbatches 3",
)
MESHES = {n: _meshes(n) for n in RANKS}


@st.composite
def cases(draw: st.DrawFn, plan: str | None = None, num_ranks: int | None = None) -> VerifyOptions:
    """Draw a whole command line, of one plan and number of ranks where given; sizes are odd by default."""
    num_ranks = num_ranks or draw(st.sampled_from(tuple(RANKS)))
    model = draw(st.sampled_from(("llama", "gpt", "mlp", "llama", "gpt", OWN)))
    # Tolerances of 16 bits are of gradients that are sums of many terms and of a short way from there: OWN's scalar gain
    # cancels to nearly nothing, large steps without a clip multiply any difference, and so does a norm over a few numbers
    # that are nearly equal (one device alone is off by as much).
    some = ("fp64", "fp64", "fp64", "fp64", "bf16", "fp16")
    precision = "fp64" if model in (OWN, "mlp") else draw(st.sampled_from(some))
    narrow = precision != "fp64"
    heads, kv_heads = draw(st.sampled_from(HEADS))
    return VerifyOptions(
        check=CheckOptions(draw(st.sampled_from((0.2, 0.0, 0.5, 1.0))), draw(st.booleans())),
        mesh=MeshOptions(
            mesh=draw(st.sampled_from(MESHES[num_ranks])),
            plan=plan or draw(st.sampled_from(tuple(PLANS))),  # type: ignore[arg-type]
            sp=draw(st.booleans()),
            backend="gloo",
        ),
        model=ModelOptions(
            model=model,
            layers=draw(st.sampled_from((1, 1, 1, 2, 2, 5, 3, 2, 1, 1))),
            embed=draw(st.sampled_from((30, 30)) | st.integers(15 if narrow else 3, 33)),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=draw(st.sampled_from((6, 2, 4))),
            mlp=draw(st.just(26) | st.integers(1, 27)),
            vocab=draw(st.just(67) | st.integers(5, 70)),
            seq=draw(st.just(15) | st.integers(1, 17)),
            dropout=draw(st.just(0.0) | st.floats(0.1, 0.5)),
            tied=draw(st.booleans()),
        ),
        batch=BatchOptions(global_batch=draw(st.integers(1, 9)), microbatches=draw(st.integers(1, 3))),
        optimizer=replace(
            SGD,
            steps=draw(st.integers(2, 3)),
            lr=draw(st.sampled_from((0.1,) if narrow else (1.0, 0.3))),
            momentum=draw(st.sampled_from((0.0, 0.9))),
            weight_decay=draw(st.sampled_from((0.0, 0.1))),
            clip=draw(st.sampled_from((0.1,) if narrow else (0.1, 0.0, 1e3))),
            clip_order=draw(st.sampled_from(("2", "1", "inf"))),
            seed=draw(st.integers(0, 5)),
        ),
        program=replace(
            VerifyOptions().program,
            precision=precision,
            **draw(RECOMPUTE),
            prefetch=draw(st.sampled_from((1, 0, 2))),
            bucket_mb=draw(st.sampled_from((0.0, 25.0, 0.02))),
            disable_pass=draw(st.just(()) | st.sampled_from([(name,) for name in PASSES])),
        ),
    )


RECOMPUTE = st.sampled_from(
    (
        *({"recompute": mode} for mode in ("none", "full", "selective", "every-2")),
        {"save": "min-cut"},
        {"recompute": "every-2", "save": "min-cut"},
        *({"activation_budget": budget} for budget in (0.6, 0.3)),
    )
)


def setup_of(options: VerifyOptions) -> Setup:
    """Resolve options as the command does."""
    return resolve(options, global_batch=7, **DEFAULTS)


def arguments_of(options: VerifyOptions) -> list[str]:
    """Return the command line of options: what differs from the defaults."""
    found = []
    for group in fields(VerifyOptions):
        chosen, default = getattr(options, group.name), getattr(VerifyOptions(), group.name)
        for option in fields(chosen):
            value, name = getattr(chosen, option.name), option.name.replace("_", "-")
            if value == getattr(default, option.name):
                continue
            if isinstance(value, bool):
                found.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, tuple):
                found += [f"--{name}", *value]
            else:
                found += [f"--{name}", str(value)]
    return found


def command_of(options: VerifyOptions) -> str:
    """Return the command that reproduces an example."""
    return shlex.join(["python", "-m", "dtengine.verify", *arguments_of(options)])


def parsed(arguments: str | list[str]) -> VerifyOptions:
    """Read a command line of the command."""
    return parse(VerifyOptions, "verify", shlex.split(arguments) if isinstance(arguments, str) else arguments)


# --- what the ranks run ---------------------------------------------------------------------------------------------


def run_compare(rank: int, options: VerifyOptions) -> Report:
    """What ``python -m dtengine.verify`` runs on each rank."""
    setup = setup_of(options)
    return compare(setup, options.optimizer, options.check, build_mesh(setup.plan.sizes), command_of(options))


def run_plan(rank: int, options: VerifyOptions) -> tuple[Trained, bool]:
    """The plan's side of the comparison alone."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    trained, equal, _ = train_plan(setup, options.optimizer, random_batch(setup, options.check), mesh)
    return trained, equal


def step_of(options: VerifyOptions) -> tuple[Setup, Mesh, Step]:
    """A step as ``train_plan`` makes it, on this process group's ranks."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    optimizer = sgd(options.optimizer.momentum, options.optimizer.weight_decay)
    lr = options.optimizer.lr
    return (
        setup,
        mesh,
        setup.bind(mesh, optimizer, lambda _: lr),
    )


def batches_of(setup: Setup, mesh: Mesh, check: CheckOptions) -> list[Batch]:
    """This rank's microbatches of a random batch that fills the shape."""
    batch = random_batch(replace(setup, global_batch=math.prod(setup.batch_shape)), check)
    rows = torch.from_numpy(rows_of(setup.batch_shape, mesh.data_coordinate(setup.plan.data_axes)))
    return [Batch(*(x[some] for x in batch)) for some in rows]


def num_ranks_of(options: VerifyOptions) -> int:
    """Product of the mesh sizes."""
    return math.prod(parse_mesh(options.mesh.mesh).values())


def check_equal(pool: Pool, options: VerifyOptions) -> Report:
    """Hold a plan to one device, and all ranks to one report."""
    try:
        reports = pool.run(num_ranks_of(options), run_compare, options)
        assert reports[0].ok, str(reports[0])
        for report in reports:  # stages communicate each in its own way
            assert report._replace(collectives=reports[0].collectives) == reports[0] or report == reports[0]
            assert report == reports[0] or "pp" in parse_mesh(options.mesh.mesh), "ranks report differently"
    except AssertionError as error:
        error.add_note(f"reproduce with: {command_of(options)}")
        raise
    return reports[0]


# --- the property ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
def test_any_plan_equals_one_device(pool: Pool, distribution: dict[str, Counter[str]]) -> None:
    """Loss of each step, raw gradients and norm of step 1, parameters and buffers after the last step equal one device's
    within 1e-9 in float64 (in bf16 and fp16 within what rounding explains), with replicas bit-equal, for any mesh, plan,
    model and sizes; the examples cover the space."""
    examples = 2 * settings.default.max_examples  # type: ignore[union-attr]
    seen: dict[str, Counter[str]] = {
        name: distribution.setdefault(name, Counter())
        for name in (
            *("ranks", "plan", "axes", "sp", "model", "microbatches", "layers", "dropout", "clip", "clip_order"),
            *("recompute", "save", "prefetch", "bucket", "without", "precision"),
        )
    }

    def check(options: VerifyOptions) -> None:
        sizes = parse_mesh(options.mesh.mesh)
        seen["ranks"][str(num_ranks_of(options))] += 1
        seen["plan"][options.mesh.plan] += 1
        seen["axes"]["+".join(name if size > 1 else f"{name}(1)" for name, size in sizes.items())] += 1
        seen["sp"][str(options.mesh.sp)] += 1
        seen["model"]["own" if options.model.model == OWN else options.model.model] += 1
        seen["microbatches"][str(options.batch.microbatches)] += 1
        seen["layers"][str(options.model.layers)] += 1
        seen["dropout"]["on" if options.model.dropout else "off"] += 1
        seen["clip"][str(options.optimizer.clip)] += 1
        seen["clip_order"][options.optimizer.clip_order] += 1
        program = options.program
        seen["recompute"]["budget" if program.activation_budget else program.recompute] += 1
        seen["save"][program.save] += 1
        seen["prefetch"][str(program.prefetch)] += 1
        seen["bucket"][str(program.bucket_mb)] += 1
        seen["precision"][program.precision] += 1
        seen["without"][" ".join(program.disable_pass) or "nothing"] += 1
        check_equal(pool, options)

    for corner in CORNERS:
        check(parsed(corner))
    # Hypothesis likes to repeat parts of earlier examples: plans and ranks are dealt out, not drawn.
    drawn = max(1, examples - len(CORNERS))
    for number, (plan, num_ranks) in enumerate(itertools.product(PLANS, RANKS)):
        share = max(1, round(RANKS[num_ranks] * drawn / (len(PLANS) * sum(RANKS.values()))))
        some = settings(max_examples=share)(given(options=cases(plan, num_ranks))(check))
        if settings.default.derandomize:  # type: ignore[union-attr]
            some = seed(number)(some)  # else all would see the same examples
        some()
    total = seen["ranks"].total()
    assert total >= examples
    if examples < 200:  # too few to cover the space
        return
    assert sum(n for ranks, n in seen["ranks"].items() if int(ranks) >= 4) >= total / 2
    assert set(seen["plan"]) == set(PLANS)
    assert min(seen["plan"].values()) >= examples / 10
    assert {axis for axes in seen["axes"] for axis in axes.split("+")} == {
        "rep",
        "dp",
        "tp",
        "rep(1)",
        "dp(1)",
        "tp(1)",
    }
    assert len(seen["model"]) == 4
    for name in ("sp", "model", "microbatches", "recompute", "prefetch", "bucket"):
        assert min(seen[name].values()) >= examples / 20, name
    assert set(seen["without"]) == {"nothing", *PASSES}
    assert seen["precision"]["fp64"] >= total / 2
    assert min(seen["precision"][p] for p in ("bf16", "fp16")) >= examples / 50


def test_command_line_reproduces_the_example() -> None:
    """The printed command parses back to the same options, and those resolve to the same setup."""

    @given(options=cases())
    def check(options: VerifyOptions) -> None:
        again = parsed(command_of(options).removeprefix("python -m dtengine.verify"))
        assert again == options
        same, setup = setup_of(again), setup_of(options)
        if options.model.model == OWN:  # a person's own model is loaded anew each time
            same = replace(same, model=setup.model)
        assert same == setup

    check()


@pytest.mark.timeout(600)
def test_traced_and_eager_are_bit_equal(pool: Pool) -> None:
    """The untraced functions give the same bits as the program on the same mesh: losses, gradients, norm, parameters."""

    @settings(max_examples=max(1, settings.default.max_examples // 32))  # type: ignore[union-attr]
    @given(options=cases())
    @example(parsed("--mesh 2x2 --microbatches 2 --dropout 0.1 --layers 1"))
    @example(parsed("--mesh rep=2,dp=2 --plan zero1 --model gpt --layers 1 --momentum 0.9"))
    def check(options: VerifyOptions) -> None:
        note(f"reproduce with: {command_of(options)}")
        eagerly = replace(options, program=replace(options.program, eager=True))
        for traced, eager in zip(
            *(pool.run(num_ranks_of(options), run_plan, o) for o in (options, eagerly)), strict=True
        ):
            assert_same_bits(traced[0], eager[0])
            assert traced[1] and eager[1]

    check()


def assert_same_bits(a: Trained, b: Trained) -> None:
    """Every number of both is the same bits."""
    assert a.losses == b.losses
    assert a.norm == b.norm
    for mine, yours in ((a.grads, b.grads), (a.params, b.params), (a.buffers, b.buffers)):
        assert mine.keys() == yours.keys()
        assert [n for n in mine if not torch.equal(mine[n], yours[n])] == []


# --- random values --------------------------------------------------------------------------------------------------


def run_draws(rank: int, options: VerifyOptions) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Whole initial weights, and for each microbatch (its rows, the dropout of ones), as this mesh draws them."""
    setup, mesh, step = step_of(options)
    params = init_state(step).params
    weights = dict(zip(params, gather(list(params.values()), mesh), strict=True))
    shape, sizes, layout = setup.batch_shape, mesh.sizes, setup.plan.compute
    rows_at, x_at = layout.placements(("batch",), sizes), layout.placements(axes_of("batch res_seq embed"), sizes)
    key = random.fold(random.key(setup.step.seed, "dropout"), torch.tensor(3))
    masks = []
    for local in torch.from_numpy(rows_of(shape, mesh.data_coordinate(setup.plan.data_axes))):
        rows = wrap(local, mesh, rows_at, (shape.coordinates * shape.microbatch,))
        ops = Ops(mesh, layout, key, rows, 0.4)
        whole = (rows.shape[0], setup.model_config.seq, setup.model_config.embed)
        (seq,) = (ops.index("res_seq", whole[1]),)
        ones = torch.ones(len(local), seq.to_local().shape[0], whole[2])  # type: ignore[attr-defined]
        dropped = ops.at("place").dropout(wrap(ones, mesh, x_at, whole), "batch res_seq embed", "site")
        masks.append(tuple(gather([rows, dropped], mesh)))  # type: ignore[list-item]
    return weights, masks


def test_weights_and_masks_depend_on_no_mesh(pool: Pool) -> None:
    """Initial weights and dropout masks are the same bits on every mesh, for every plan and number of microbatches."""

    @settings(max_examples=max(1, settings.default.max_examples // 4))  # type: ignore[union-attr]
    @given(options=cases())
    def check(options: VerifyOptions) -> None:
        note(f"drawn: {command_of(options)}")
        setup = setup_of(options)
        specs = parameters(setup.model.specs(setup.model_config))
        rows = torch.arange(math.prod(setup.batch_shape))
        key = random.fold(random.key(setup.step.seed, "dropout"), torch.tensor(3))
        ones = torch.ones(len(rows), setup.model_config.seq, setup.model_config.embed)
        mask = Ops(None, None, key, rows, 0.4).at("place").dropout(ones, "batch res_seq embed", "site")
        for weights, masks in pool.run(num_ranks_of(options), run_draws, options):
            assert weights.keys() == specs.keys()
            for name, spec in specs.items():
                whole = init_param(spec, name, setup.step.seed, [(0, s) for s in spec.shape], "cpu")
                assert torch.equal(weights[name], whole.to(weights[name].dtype)), name
            assert sorted(torch.cat([some for some, _ in masks]).tolist()) == rows.tolist()
            for some, dropped in masks:
                assert torch.equal(dropped, mask[some])

    check()


def run_two_steps(rank: int, options: VerifyOptions) -> list[float]:
    setup, mesh, step = step_of(options)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batches)
        losses.append(metrics.loss.item())
    return losses


@pytest.mark.parametrize("mesh", ["1", "2x2"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_step_number_is_not_frozen(pool: Pool, mesh: str, model: str) -> None:
    """With lr 0 and the same batch, steps 1 and 2 differ by their dropout masks, and without dropout not at all."""
    options = parsed(f"--mesh {mesh} --model {model} --layers 1 --microbatches 2")
    for dropout, same in ((0.3, False), (0.0, True)):
        drawn = replace(
            options, model=replace(options.model, dropout=dropout), optimizer=replace(options.optimizer, lr=0.0)
        )
        for first, second in pool.run(num_ranks_of(options), run_two_steps, drawn):
            assert (first == second) is same


def run_graphs(rank: int, options: VerifyOptions) -> list[tuple[str, list[tuple[str, bool]], list[tuple[int, ...]]]]:
    """For each program: its operators with whether they are random, and the shapes of its constants."""
    setup, mesh, step = step_of(options)
    step.prepare()
    state = init_state(step)
    step.evaluate(state, batches_of(setup, mesh, options.check))
    found = []
    for name, program in step.programs.items():
        assert isinstance(program, Program)
        graph = program.graph.graph
        operators = [(str(n.target), _draws(n)) for n in graph.nodes if n.op.startswith("call")]
        constants = [getattr(program.graph, str(n.target)) for n in graph.nodes if n.op == "get_attr"]
        found.append((name, operators, [tuple(c.shape) for c in constants]))
    return found


def _draws(node: torch.fx.Node) -> bool:
    """Whether a node draws from a generator; attention is tagged so, and draws where its dropout is not 0."""
    if "attention" in str(node.target):
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        return bool({**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("dropout_p", 0.0))
    words = ("rand", "bernoulli", "dropout", "normal_", "uniform", "philox", "seed")
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or any(word in str(node.target) for word in words)


@pytest.mark.parametrize("mesh", ["1", "2x2"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_program_holds_no_batch_and_no_generator(pool: Pool, mesh: str, model: str) -> None:
    """A program with dropout draws from no generator, and its constants (positions, rotary tables) have no batch dim."""
    microbatch, seq = 11, 13
    options = parsed(
        f"--mesh {mesh} --model {model} --layers 1 --microbatch 11 --microbatches 2 --seq 13 --dropout 0.3"
    )
    batch_sizes = {n * k for n in (microbatch, 2 * microbatch, 4 * microbatch) for k in (1, seq, 7, 6)}
    for programs in pool.run(num_ranks_of(options), run_graphs, options):
        assert [name.split()[0] for name, _, _ in programs] == ["accumulate", "step", "evaluate"]
        for name, operators, constants in programs:
            assert operators
            assert [target for target, draws in operators if draws] == [], name
            assert [shape for shape in constants if batch_sizes & set(shape)] == [], name
