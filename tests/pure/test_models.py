"""Models: held to an independent implementation, counted against what was published, and loaded from a person's file."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import gpt, llama, loss  # type: ignore[import-not-found]  # tests/reference.py, by tests/conftest.py

from dtengine.data import IGNORE, Batch
from dtengine.model import Model, ModelConfig, Param, Tied, configure, forward, load_model, parameters
from dtengine.ops import Ops

REFERENCES = {"gpt": gpt, "llama": llama}
SIZES = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        # LayerNorm over two numbers is a sign: its gradient is a difference of equal numbers, and no two ways agree on it.
        "embed": st.integers(5, 13),
        "kv_heads": st.integers(1, 3),
        "q_per_kv": st.integers(1, 3),
        "half_head": st.integers(1, 3),
        "mlp": st.integers(1, 11),
        "vocab": st.integers(1, 13),
        "seq": st.integers(1, 9),
        "tied": st.booleans(),
    }
)


def make(sizes: dict) -> ModelConfig:
    heads = sizes["kv_heads"] * sizes["q_per_kv"]
    rest = {k: v for k, v in sizes.items() if k not in ("q_per_kv", "half_head")}
    return ModelConfig(**rest, heads=heads, head_dim=2 * sizes["half_head"])


def gradients(total: torch.Tensor, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(total, list(params.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(params, found, strict=True))


# The mathematics


@pytest.mark.parametrize("name", REFERENCES)
@given(sizes=SIZES, rows=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=150)
def test_loss_and_gradients_are_those_of_an_independent_implementation(name, sizes, rows, seed):
    """Loss, count, logits and every gradient agree to 1e-12 in float64 (of the largest value, where that is above 1),
    with ignored labels and token weights, for any sizes: one head or many, one token."""
    model, config = load_model(name), make(sizes)
    specs = model.specs(config)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    params = {n: (p.mean + random(*p.shape) / 2).requires_grad_() for n, p in parameters(specs).items()}
    shape = (rows, config.seq)
    tokens, targets = (torch.randint(config.vocab, shape, generator=generator) for _ in range(2))
    targets[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    weights[torch.rand(shape, generator=generator) < 0.2] = 0.0
    batch = Batch(tokens, targets, weights, torch.arange(rows))

    logits = forward(model, specs, params, batch, Ops())
    total, count = model.loss(logits, batch, Ops())
    expected = REFERENCES[name](params, tokens)
    expected_total, expected_count = loss(expected, targets, weights)

    found, wanted = gradients(total, params), gradients(expected_total, params)
    # Terms as large as the largest gradient cancel in the small ones: a norm over two numbers has almost none.
    largest = max(g.abs().max().item() for g in wanted.values())
    for one, other in [(logits, expected), (total, expected_total), (count, expected_count)]:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for n in params:
        torch.testing.assert_close(found[n], wanted[n], rtol=0, atol=1e-12 * max(1.0, largest))


@pytest.mark.parametrize("name", REFERENCES)
def test_a_token_does_not_see_the_tokens_behind_it(name):
    """Changing a token changes no logits before it, and those at and behind it."""
    model, config = load_model(name), ModelConfig(vocab=17, seq=7, embed=8, heads=4, kv_heads=2, head_dim=2, mlp=5)
    specs = model.specs(config)
    generator = torch.Generator().manual_seed(0)
    params = {
        n: p.mean + torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in parameters(specs).items()
    }
    tokens = torch.arange(7).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 4] = 16
    one, other = (
        forward(model, specs, params, Batch(t, t, torch.ones(1, 7), torch.zeros(1)), Ops()) for t in (tokens, changed)
    )
    assert torch.equal(one[:, :4], other[:, :4])
    assert all(not torch.equal(one[:, i], other[:, i]) for i in (4, 5, 6))


# Sizes

PUBLISHED = [
    ("gpt", "gpt2", 124_439_808),
    ("gpt", "gpt2-medium", 354_823_168),
    ("gpt", "gpt2-large", 774_030_080),
    ("gpt", "gpt2-xl", 1_557_611_200),
    ("llama", "llama-7b", 6_738_415_616),
    ("llama", "llama-13b", 13_015_864_320),
    ("llama", "llama3.2-1b", 1_235_814_400),
    ("llama", "llama3.2-3b", 3_212_749_824),
    ("llama", "llama3-8b", 8_030_261_248),
    ("llama", "llama3-70b", 70_553_706_496),
    ("llama", "llama3-405b", 405_853_388_800),
]


@pytest.mark.parametrize(("name", "size", "count"), PUBLISHED)
def test_published_sizes_have_the_published_number_of_parameters(name, size, count):
    """A size counts, from its descriptions alone, as many parameters as were published; a tied table counts once."""
    model = load_model(name)
    params = parameters(model.specs(configure(model, name, size)))
    assert sum(math.prod(p.shape) for p in params.values()) == count


def test_every_published_size_is_counted_above():
    """A new size needs its number."""
    sizes = {s for name in REFERENCES for s in load_model(name).sizes or {}}
    assert {size for _, size, _ in PUBLISHED} == sizes


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("tied", [True, False])
def test_specs_name_every_dim_and_start_as_published(name, tied):
    """Each dim has a logical axis; norms start at 1 and biases at 0, neither decays; projections into the residual
    stream start smaller, by 1/sqrt(2 layers); tied parameters appear once."""
    model = load_model(name)
    params = parameters(model.specs(ModelConfig(layers=8, tied=tied)))
    assert ("head.unembed" in params) == (not tied)
    for path, param in params.items():
        assert len(param.names) == len(param.shape)
        if param.std == 0:
            assert param.mean == ("norm" in path and not path.endswith("bias"))
            assert not param.decayed
        else:
            into_residual = ".out" in path or ".down" in path
            assert param.std == pytest.approx(0.02 / 4 if into_residual else 0.02)
            assert param.decayed


def test_decay_can_be_said_by_the_model():
    """Decay is for drawn matrices by default; a model may say otherwise for any parameter."""
    assert Param("vocab embed", (3, 4), std=0.1).decayed
    assert not Param("embed", (4,), std=0.1).decayed
    assert not Param("vocab embed", (3, 4)).decayed
    assert not Param("vocab embed", (3, 4), std=0.1, decay=False).decayed
    assert Param("embed", (4,), decay=True).decayed


def test_configure_fills_in_what_follows():
    """kv_heads follows heads, head_dim is embed / heads, mlp four times embed, where nothing else says so."""
    model = Model(lambda config: {}, lambda *a: a[1], lambda *a: a[1], lambda *a: a[1])
    config = configure(model, "mine", embed=48, heads=6)
    assert (config.kv_heads, config.head_dim, config.mlp, config.q_per_kv) == (6, 8, 192, 1)
    config = configure(model, "mine", heads=6, kv_heads=2, head_dim=5, mlp=7)
    assert (config.embed, config.head_dim, config.mlp) == (64, 5, 7)
    assert config.axis_sizes == {"kv_heads": 2, "q_per_kv": 3}
    with pytest.raises(ValueError) as error:
        configure(model, "mine", "large")
    assert str(error.value) == "--size large: mine has no such size. Use one of (none)."


# Descriptions


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"embed": {}}, "model specs: no blocks, head; a model has the parts embed, blocks and head."),
        (
            {"embed": {"table": 3}, "blocks": [], "head": {}},
            "model specs: embed.table is a int; every leaf is a Param, a Tied or a Buffer.",
        ),
        (
            {"embed": {}, "blocks": [{"w": Param("embed", (3, 4))}], "head": {}},
            "model specs: blocks.0.w has axes 'embed' for shape (3, 4); name each dim.",
        ),
        (
            {"embed": {}, "blocks": [], "head": {"w": Tied("embed.table")}},
            "model specs: head.w is tied to embed.table, which is no parameter.",
        ),
        (
            {"embed": {"a": Tied("head.b")}, "blocks": [], "head": {"b": Tied("embed.a")}},
            "model specs: embed.a is tied to head.b, which is no parameter.",
        ),
    ],
)
def test_descriptions_that_make_no_model_are_errors(specs, message):
    """A part that is missing, a leaf that is none, a dim without a name or a tie to nothing is named."""
    with pytest.raises(ValueError) as error:
        parameters(specs)
    assert str(error.value) == message


# A person's own file

FILE = """
import torch
from dtengine.model import Model, Param

def specs(config):
    table = Param("vocab embed", (config.vocab, config.embed), 0.1)
    return {"embed": {"table": table}, "blocks": [{}] * config.layers, "head": {"out": table}}

MINE = Model(
    specs,
    lambda params, batch, ops: ops.embedding(params["table"], batch.tokens),
    lambda params, x, ops: x,
    lambda params, x, ops: ops.einsum("batch seq embed, vocab embed -> batch seq vocab", x, params["out"]),
    sizes={"small": {"embed": 8}},
)
MODEL = MINE
number = 3
"""


def test_a_persons_own_model_file_loads_and_runs(tmp_path):
    """path/to/file.py:name is that value, without a name it is MODEL; sizes and forward work as for built-in models."""
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    model = load_model(f"{path}:MINE")
    assert isinstance(load_model(str(path)), Model)
    config = configure(model, "mine", "small", vocab=7)
    specs = model.specs(config)
    params = {n: torch.ones(p.shape) for n, p in parameters(specs).items()}
    assert list(params) == ["embed.table", "head.out"]
    batch = Batch(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3).long(), torch.ones(2, 3), torch.arange(2))
    logits = forward(model, specs, params, batch, Ops())
    assert torch.equal(logits, torch.full((2, 3, 7), 8.0))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (FILE, "mine.py:YOURS", "--model {name}: YOURS in {path} is missing. Models in it: MINE, MODEL."),
        (FILE, "mine.py:number", "--model {name}: number in {path} is no dtengine.Model. Models in it: MINE, MODEL."),
        ("x = 1", "mine.py", "--model {name}: MODEL in {path} is missing. Models in it: none."),
        ("1/0", "mine.py:M", "--model {name}: {path} fails to load: ZeroDivisionError: division by zero"),
        (
            "import no_such_thing",
            "mine.py:M",
            "--model {name}: {path} fails to load: ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        (FILE, "yours.py:M", "--model {name}: there is no file {path}. Give path/to/file.py:name."),
        (FILE, "mine.txt:M", "--model {name}: {path} is not a Python file. Give path/to/file.py:name."),
    ],
)
def test_a_file_that_holds_no_such_model_says_so(tmp_path, text, name, message):
    """The message has the option as typed and what was found in the file."""
    for file in ("mine.py", "mine.txt"):
        (tmp_path / file).write_text(text)
    typed = f"{tmp_path}/{name}"
    path = typed.partition(":")[0]
    with pytest.raises(ValueError) as error:
        load_model(typed)
    assert str(error.value) == message.format(name=typed, path=path)


def test_a_file_with_a_syntax_error_says_where(tmp_path):
    """A file that does not parse is named with its line."""
    path = tmp_path / "mine.py"
    path.write_text("x = 1\ny = (\n")
    with pytest.raises(ValueError) as error:
        load_model(f"{path}:M")
    assert str(error.value).startswith(f"--model {path}:M: {path} fails to load: SyntaxError: '(' was never closed")
    assert "line 2" in str(error.value)


def test_an_unknown_name_is_an_error():
    """A name that is neither built in nor a file is refused with both ways."""
    with pytest.raises(ValueError) as error:
        load_model("bert")
    assert str(error.value) == (
        "--model bert: no such model. Use gpt, llama, mlp, or a file of your own as path/to/file.py:name."
    )
