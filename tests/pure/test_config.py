"""Options: every one has its name, what they resolve to agrees, and mistakes are one message with a cure."""

import dataclasses
import json
import re
from typing import get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtengine import config
from dtengine.config import new_run_dir, resolve, solve_batch
from dtengine.layout import chunk_bounds, head_axis, make_plan
from dtengine.model import Param
from dtengine.optim import OPTIMIZERS
from dtengine.options import (
    BatchOptions,
    MeshOptions,
    ModelOptions,
    OptimizerOptions,
    ProgramOptions,
    StepOptions,
    TrainOptions,
    fail,
    from_json,
    parse,
    to_json,
)
from dtengine.rates import DECAYS

SMALL = {"layers": 1, "embed": 8, "heads": 2, "vocab": 17, "seq": 6, "global_batch": 4}
COUNTS = st.integers(1, 40)
MAYBE = st.none() | COUNTS


def flat(options: TrainOptions) -> dict:
    """Return {field: value} of all groups."""
    return {k: v for group in dataclasses.asdict(options).values() for k, v in group.items()}


def setup(
    mesh: dict | None = None,
    model: dict | None = None,
    batch: dict | None = None,
    program: dict | None = None,
    **optimizer,
) -> config.Setup:
    options = StepOptions(
        MeshOptions(**mesh or {}),
        ModelOptions(**model or {}),
        BatchOptions(**batch or {}),
        OptimizerOptions(**optimizer),
        ProgramOptions(**program or {}),
    )
    return resolve(options, **SMALL)


# Names

OPTIONS = {
    "--mesh": ("2x4", "mesh", "2x4"),
    "--plan": ("zero2", "plan", "zero2"),
    "--backend": ("gloo", "backend", "gloo"),
    "--trace-step": ("7", "trace_step", 7),
    "--start-timeout": ("7", "start_timeout", 7.0),
    "--no-sp": (None, "sp", False),
    "--model": ("gpt", "model", "gpt"),
    "--size": ("gpt2", "size", "gpt2"),
    "--layers": ("5", "layers", 5),
    "--embed": ("48", "embed", 48),
    "--heads": ("6", "heads", 6),
    "--kv-heads": ("3", "kv_heads", 3),
    "--head-dim": ("10", "head_dim", 10),
    "--mlp": ("26", "mlp", 26),
    "--vocab": ("67", "vocab", 67),
    "--seq": ("15", "seq", 15),
    "--dropout": ("0.1", "dropout", 0.1),
    "--tied": (None, "tied", True),
    "--global-batch": ("7", "global_batch", 7),
    "--microbatch": ("2", "microbatch", 2),
    "--microbatches": ("3", "microbatches", 3),
    "--steps": ("20", "steps", 20),
    "--optimizer": ("sgd", "optimizer", "sgd"),
    "--lr": ("1e-3", "lr", 1e-3),
    "--warmup": ("4", "warmup", 4),
    "--lr-decay": ("linear", "lr_decay", "linear"),
    "--decay-steps": ("5", "decay_steps", 5),
    "--lr-floor": ("0.2", "lr_floor", 0.2),
    "--base-batch": ("8", "base_batch", 8),
    "--lr-scaling": ("linear", "lr_scaling", "linear"),
    "--lr-scale-max": ("4", "lr_scale_max", 4.0),
    "--weight-decay": ("0.3", "weight_decay", 0.3),
    "--momentum": ("0.9", "momentum", 0.9),
    "--label-smoothing": ("0.1", "label_smoothing", 0.1),
    "--z-loss": ("1e-4", "z_loss", 1e-4),
    "--clip": ("0.5", "clip", 0.5),
    "--clip-order": ("inf", "clip_order", "inf"),
    "--precision": ("bf16", "precision", "bf16"),
    "--reduce-dtype": ("compute", "reduce_dtype", "compute"),
    "--loss-scale": ("1024", "loss_scale", 1024.0),
    "--loss-scale-window": ("50", "loss_scale_window", 50),
    "--seed": ("3", "seed", 3),
    "--recompute": ("every-2", "recompute", "every-2"),
    "--activation-budget": ("0.6", "activation_budget", 0.6),
    "--save": ("min-cut", "save", "min-cut"),
    "--prefetch": ("2", "prefetch", 2),
    "--bucket-mb": ("0", "bucket_mb", 0.0),
    "--offload": ("optimizer", "offload", "optimizer"),
    "--disable-pass": ("fill-buckets", "disable_pass", ("fill-buckets",)),
    "--compile": (None, "compile", True),
    "--no-reshard": (None, "reshard", False),
    "--no-trace-cache": (None, "trace_cache", False),
    "--cuda-graphs": (None, "cuda_graphs", True),
    "--passes": (None, "passes", True),
    "--eager": (None, "eager", True),
    "--schedule": ("zbv", "schedule", "zbv"),
    "--chunks": ("3", "chunks", 3),
    "--stage-layers": ("2,3", "stage_layers", "2,3"),
    "--data": ("a.txt", "data", ("a.txt",)),
    "--heldout-fraction": ("0.1", "heldout_fraction", 0.1),
    "--eval-every": ("0", "eval_every", 0),
    "--eval-sequences": ("9", "eval_sequences", 9),
    "--run-dir": ("runs/x", "run_dir", "runs/x"),
    "--resume": (None, "resume", True),
    "--save-every": ("11", "save_every", 11),
    "--log-every": ("2", "log_every", 2),
    "--explain": (None, "explain", True),
    "--no-memory-report": (None, "memory_report", False),
    "--sample": ("0", "sample", 0),
}


def test_every_option_has_its_name_and_no_prefix():
    """All options typed at once, each by its own flat name, arrive in their fields; and there is no other option."""
    typed = [word for name, (value, *_) in OPTIONS.items() for word in ((name,) if value is None else (name, value))]
    expected = {field: value for _, field, value in OPTIONS.values()}
    assert flat(parse(TrainOptions, "train", typed)) == expected
    assert len(expected) == sum(len(group) for group in dataclasses.asdict(TrainOptions()).values())


def test_nothing_typed_is_the_defaults():
    """Without a word the options are the defaults of their groups."""
    assert parse(TrainOptions, "train", []) == TrainOptions()


@pytest.mark.parametrize(
    ("typed", "tied"),
    [
        ([], None),
        (["--tied"], True),
        (["--no-tied"], False),
        (["--tied", "True"], True),
        (["--tied", "False"], False),
        (["--tied", "--seq", "4"], True),
        (["--seq", "4", "--tied"], True),
        (["--no-tied", "--tied"], True),
    ],
)
def test_tied_is_a_flag_with_a_third_state(typed, tied):
    """--tied and --no-tied decide; without either the model does; a value behind it is understood too."""
    assert parse(TrainOptions, "train", typed).model.tied is tied


@pytest.mark.parametrize(("typed", "mesh"), [(["--mesh", "-1x2"], "-1x2"), (["--mesh=-1x2"], "-1x2")])
def test_a_mesh_that_begins_with_a_minus_is_a_mesh(typed, mesh):
    """`--mesh -1x2` reaches the check of meshes and is no unknown option."""
    assert parse(TrainOptions, "train", typed).mesh.mesh == mesh
    assert parse(TrainOptions, "train", ["--lr", "-0.5"]).optimizer.lr == -0.5


@pytest.mark.parametrize(
    ("typed", "named"),
    [(["--plan", "zero3"], "--plan"), (["--steps", "many"], "--steps"), (["--layerz", "3"], "--layerz")],
)
def test_a_mistyped_option_ends_with_code_2_and_its_name(typed, named, capsys):
    """What tyro refuses is exit code 2, and the option is named; nothing goes to stdout."""
    with pytest.raises(SystemExit) as end:
        parse(TrainOptions, "train", typed)
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert named in printed.err and not printed.out


def test_help_names_every_option(capsys):
    """--help shows every option by its name and leaves with code 0."""
    with pytest.raises(SystemExit) as end:
        parse(TrainOptions, "train", ["--help"])
    assert end.value.code == 0
    words = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(OPTIONS) <= words


def test_a_resumed_run_keeps_its_options_where_none_are_typed():
    """Options that are typed win over the stored ones, all others stay as stored."""
    stored = parse(TrainOptions, "train", ["--mesh", "2x2", "--steps", "7", "--no-tied", "--data", "a", "b"])
    now = parse(TrainOptions, "train", ["--steps", "9", "--resume"], default=stored)
    assert (now.mesh.mesh, now.optimizer.steps, now.model.tied, now.data.data) == ("2x2", 9, False, ("a", "b"))
    assert now.run.resume


def test_fail_prints_one_line_and_leaves_with_code_2(capsys):
    """A mistake is one line on stderr without a traceback, and exit code 2."""
    with pytest.raises(SystemExit) as end:
        fail("--mesh 0x4: no.")
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "dtengine: --mesh 0x4: no.\n")


def test_the_folder_of_a_run_says_what_it_is():
    """runs/ and the time, model (size, or file) plan and mesh, in characters that any file system takes."""
    assert str(new_run_dir(TrainOptions(), "NOW")) == "runs/NOW-llama-fsdp-1"
    mesh = MeshOptions("rep=2, dp=2", "zero1")
    assert str(new_run_dir(TrainOptions(mesh, ModelOptions("a/my.py:M")), "NOW")) == "runs/NOW-my-zero1-rep2-dp2"
    assert str(new_run_dir(TrainOptions(mesh, ModelOptions(size="gpt2")), "NOW")) == "runs/NOW-gpt2-zero1-rep2-dp2"


# JSON

VALUES = {
    "int": st.integers(0, 10**6),
    "float": st.floats(0, 10, allow_nan=False),
    "bool": st.booleans(),
    "str": st.text(max_size=5),
}


@st.composite
def stored_options(draw):
    """Draw options of every type, set and not."""
    groups = {}
    for group, default in ((f.name, getattr(TrainOptions(), f.name)) for f in dataclasses.fields(TrainOptions)):
        values = {}
        for field in dataclasses.fields(default):
            old = getattr(default, field.name)
            if isinstance(old, tuple):
                values[field.name] = draw(st.lists(st.text(max_size=3), max_size=2).map(tuple))
            elif old is None:
                values[field.name] = draw(st.none() | st.integers(1, 9) | st.text(max_size=3))
            else:
                values[field.name] = draw(VALUES[type(old).__name__])
        groups[group] = type(default)(**values)
    return TrainOptions(**groups)


@given(stored_options())
@settings(deadline=None, max_examples=30)
def test_options_come_back_from_json(options):
    """What to_json writes from_json reads, lists of files as tuples included."""
    assert from_json(to_json(options)) == options


def test_stored_options_of_another_version_are_read():
    """Options that were added since get their defaults, options that were removed are passed over."""
    stored = json.loads(to_json(TrainOptions()))
    stored["mesh"]["mesh"] = "2x2"
    del stored["optimizer"]["seed"]
    stored["optimizer"]["lookahead"] = 3
    assert from_json(json.dumps(stored)) == TrainOptions(MeshOptions("2x2"))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"mesh": 3}', '{"mesh": null}'])
def test_what_is_no_options_file_says_so(text):
    """Anything else than such a file is a ValueError in words, whatever it holds."""
    with pytest.raises(ValueError, match=r"^the stored options cannot be read \(.*\)\.$"):
        from_json(text)


# The batch


@given(COUNTS, MAYBE, MAYBE, MAYBE)
@settings(deadline=None)
def test_the_padded_batch_covers_the_global_batch_and_wastes_little(coordinates, wanted, microbatch, microbatches):
    """The product covers the global batch. Where the solver chooses the rows of a pass, padding is less than a row for
    each coordinate and pass; where it chooses the passes, one pass fewer would not do. What was given is kept."""
    try:
        batch, shape = solve_batch(coordinates, wanted, microbatch, microbatches, default=32)
    except ValueError:
        assert None not in (wanted, microbatch, microbatches)
        return
    product = shape.coordinates * shape.microbatches * shape.microbatch
    assert shape.coordinates == coordinates
    assert product >= batch >= 1
    assert batch == (wanted or (product if microbatch else 32))
    assert microbatch in (None, shape.microbatch)
    assert microbatches in (None, shape.microbatches)
    few_rows, few_passes = (product - batch < coordinates * size for size in (shape.microbatches, shape.microbatch))
    assert few_rows if microbatch is None else few_passes if microbatches is None else few_rows or few_passes


@given(COUNTS, MAYBE, MAYBE, MAYBE)
@settings(deadline=None)
@example(2, 5, 4, None)  # 8 rows in one pass; typed in full it is --global-batch 5 --microbatch 4 --microbatches 1
def test_what_the_solver_answers_may_be_typed_in_full(coordinates, wanted, microbatch, microbatches):
    """A batch that was solved is accepted with all three numbers given: `Give any two, or fewer` leaves out nothing."""
    if None in (wanted, microbatch, microbatches):
        batch, shape = solve_batch(coordinates, wanted, microbatch, microbatches)
        assert solve_batch(coordinates, batch, shape.microbatch, shape.microbatches) == (batch, shape)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
@settings(deadline=None)
def test_the_numbers_that_a_message_suggests_agree(coordinates, batch, microbatch, microbatches):
    """Three numbers that contradict each other: each cure in the message, applied, is accepted."""
    try:
        solve_batch(coordinates, batch, microbatch, microbatches)
    except ValueError as error:
        text = str(error)
    else:
        return
    found = re.search(r"Use --global-batch (\d+), or --microbatch (\d+), or leave one of the three out\.$", text)
    assert found
    better, fewer = map(int, found.groups())
    assert solve_batch(coordinates, better, microbatch, microbatches)[0] == better
    assert solve_batch(coordinates, batch, fewer, microbatches)[1].microbatch == fewer
    for left in range(3):
        three = [batch, microbatch, microbatches]
        three[left] = None
        solve_batch(coordinates, *three)


def test_three_numbers_that_contradict_each_other_are_an_error():
    """The message shows the three as typed, their product with the coordinates, the rule and the cure."""
    with pytest.raises(ValueError) as error:
        solve_batch(4, 10, 2, 3)
    assert str(error.value) == (
        "--global-batch 10 --microbatch 2 --microbatches 3: 4 data-parallel coordinates x 3 x 2 = 24. The product must "
        "be the global batch. Use --global-batch 24, or --microbatch 1, or leave one of the three out."
    )


def test_numbers_below_one_are_all_named():
    """Every number that is none is named, not the first only."""
    with pytest.raises(ValueError) as error:
        solve_batch(2, 0, 3, -1)
    assert str(error.value) == "--global-batch 0, --microbatches -1: must be a whole number of at least 1."


# What options resolve to


def test_what_is_not_given_comes_from_the_size_then_the_model_then_the_command():
    """An option wins over --size, --size over the model's defaults, those over the defaults of the command."""
    assert setup().model_config.embed == 8
    assert (setup().model_config.tied, setup(model={"model": "gpt"}).model_config.tied) == (False, True)
    sized = setup(model={"model": "gpt", "size": "gpt2", "layers": 2}).model_config
    assert (sized.layers, sized.embed, sized.head_dim, sized.mlp, sized.vocab) == (2, 768, 64, 3072, 50257)
    assert setup(batch={"microbatch": 3}, mesh={"mesh": "2"}).global_batch == 6
    assert setup().global_batch == 4


def test_a_setup_holds_what_shapes_the_step():
    """The step gets its microbatch, sequence, precision, clipping, dropout, loss and seed from the options."""
    made = setup(
        {"mesh": "2x2"},
        {"dropout": 0.1},
        {"microbatches": 2},
        {"eager": True},
        clip=0.5,
        clip_order="inf",
        seed=7,
        label_smoothing=0.2,
        z_loss=1e-3,
    )
    step = made.step
    assert (step.microbatch, step.microbatches, step.seq) == (1, 2, 6)
    assert (step.clip, step.norm_order, step.dropout, step.seed, step.eager) == (0.5, float("inf"), 0.1, 7, True)
    assert (step.label_smoothing, step.z_loss) == (0.2, 1e-3)
    assert made.plan.mesh_text() == "dp=2,tp=2"
    for name in get_args(get_type_hints(OptimizerOptions)["optimizer"]):
        assert made.optimizer(OptimizerOptions(optimizer=name, weight_decay=0.3)).weight_decay == 0.3
    weight = Param("embed", (2,))
    assert set(made.optimizer(OptimizerOptions(optimizer="sgd", momentum=0.9)).slots(weight)) == {"momentum"}
    assert set(get_args(get_type_hints(OptimizerOptions)["optimizer"])) == set(OPTIMIZERS)
    assert set(get_args(get_type_hints(OptimizerOptions)["lr_decay"])) == set(DECAYS)


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        (
            {"program": {"loss_scale": 1000.0}},
            "--loss-scale 1000: must be a power of two from 1 to 16777216, so that scaling rounds nothing. Use 65536.",
        ),
        ({"program": {"loss_scale_window": 0}}, "--loss-scale-window 0: a number of steps, at least 1."),
        (
            {"model": {"model": "bert"}},
            "--model bert: no such model. Use gpt, llama, mlp, or a file of your own as path/to/file.py:name.",
        ),
        (
            {"model": {"model": "gpt", "size": "gpt3"}},
            "--size gpt3: gpt has no such size. Use one of gpt2, gpt2-medium, gpt2-large, gpt2-xl.",
        ),
        ({"mesh": {"plan": "zero3"}}, "--plan zero3: no such plan. A plan is one of ddp, zero1, zero2, fsdp."),
        (
            {"model": {"layers": 0, "vocab": -3}},
            "--layers 0, --vocab -3: sizes are whole numbers of at least 1.",
        ),
        (
            {"model": {"heads": 6, "kv_heads": 4, "embed": 12}},
            "--kv-heads 4: does not divide --heads 6; each key head serves equally many query heads. Use one of 1, 2, "
            "3, 6.",
        ),
        (
            {"model": {"embed": 13, "heads": 4}},
            "--embed 13: --heads 4 does not divide it; without --head-dim a head is embed / heads wide. Use --embed 16, "
            "or give --head-dim.",
        ),
        (
            {"model": {"head_dim": 5}},
            "--head-dim 5: rotary positions turn pairs of dims. Use an even head dim.",
        ),
        ({"model": {"dropout": 1.0}}, "--dropout 1.0: a probability from 0 up to, not including, 1."),
        ({"model": {"dropout": float("nan")}}, "--dropout nan: a probability from 0 up to, not including, 1."),
        ({"steps": 0}, "--steps 0: must be at least 1."),
        ({"lr": -1.0}, "--lr -1.0: must be at least 0."),
        ({"lr": float("nan")}, "--lr nan: must be at least 0, and finite."),
        ({"clip": -1.0}, "--clip -1.0: must be at least 0."),
        ({"warmup": -1}, "--warmup -1: must be at least 0."),
        ({"weight_decay": -0.1}, "--weight-decay -0.1: must be at least 0."),
        ({"lr_scale_max": -1.0}, "--lr-scale-max -1.0: must be at least 0."),
        ({"base_batch": 0}, "--base-batch 0: a number of sequences, at least 1."),
        ({"label_smoothing": 1.5}, "--label-smoothing 1.5: must be from 0 to 1."),
        ({"z_loss": -1e-4}, "--z-loss -0.0001: must be at least 0."),
        (
            {"momentum": 0.9, "optimizer": "lion"},
            "--momentum 0.9: --optimizer lion does not take it; only sgd does. Leave it out, or use --optimizer sgd.",
        ),
        (
            {"decay_steps": 5},
            "--decay-steps 5: --lr-decay cosine does not take it; only wsd does. Leave it out, or use --lr-decay wsd.",
        ),
        (
            {"decay_steps": 17, "lr_decay": "wsd", "steps": 20, "warmup": 4},
            "--decay-steps 17: --steps 20 less --warmup 4 leaves 16; the decay is at least 1 step, and one of these. Use at "
            "most 16.",
        ),
        (
            {"decay_steps": 1, "lr_decay": "wsd", "steps": 4, "warmup": 4},
            "--decay-steps 1: --steps 4 less --warmup 4 leaves 0; the decay is at least 1 step, and one of these. Use more "
            "--steps, or less --warmup.",
        ),
    ],
)
def test_mistakes_in_options_are_one_message_each(given_options, message):
    """Each names the option as it is typed, the value, the rule and the cure."""
    with pytest.raises(ValueError) as error:
        setup(**given_options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "option", [{"momentum": -0.5}, {"momentum": float("nan")}, {"lr_floor": -1.0}, {"lr_floor": float("nan")}]
)
def test_numbers_that_make_no_run_are_refused(option):
    """A momentum or a floor below 0, or that is no number, is named before any rank starts."""
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"^--{name.replace('_', '-')} {value}: "):
        setup(**option)


# Warnings


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_ranks_without_a_head_are_counted(kv_heads, q_per_kv, tp):
    """There is a warning exactly where tp leaves ranks without a head, and it counts them."""
    heads = kv_heads * q_per_kv
    made = setup({"mesh": f"1x{tp}"}, {"heads": heads, "kv_heads": kv_heads, "embed": 2 * heads})
    by_kv = head_axis(kv_heads, q_per_kv, tp) == "kv_heads"
    split, name = (kv_heads, "kv heads") if by_kv else (q_per_kv, "query heads per kv head")
    idle = sum(start == stop for start, stop in (chunk_bounds(split, tp, i) for i in range(tp)))
    expected = f"{split} {name} over tp={tp}: {idle} of {tp} ranks have no head and idle during attention."
    assert made.warnings == ((expected,) if idle else ())
    assert made.plan == make_plan("fsdp", {"dp": 1, "tp": tp}, {"kv_heads": kv_heads, "q_per_kv": q_per_kv})


@pytest.mark.parametrize(
    ("batch", "padded"), [(32, None), (31, None), (30, None), (29, 32), (25, 32), (24, None), (9, 16), (1, 8)]
)
def test_padding_of_a_tenth_or_more_is_said(batch, padded):
    """From a tenth of the batch on, rows that only pad are a warning with the numbers."""
    warnings = setup({"mesh": "8"}, batch={"global_batch": batch}).warnings
    if padded is None:
        assert warnings == ()
    else:
        product = f"8 x 1 x {padded // 8}"
        rows = padded - batch
        assert warnings == (f"global batch {batch} is padded to {padded} rows ({product}): {rows} rows are idle work.",)
