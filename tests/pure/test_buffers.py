"""Buffers and batch normalisation on one device: held to torch, and what a model may say of them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dtengine.data import Batch
from dtengine.model import Buffer, ModelConfig, Param, Tied, buffers, forward_with_buffers, load_model, parameters
from dtengine.ops import Ops

CONFIG = ModelConfig(layers=2, embed=5, heads=1, kv_heads=1, mlp=7, vocab=11, seq=6)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(rows=st.integers(1, 5), seq=st.integers(1, 6), channels=st.integers(0, 4), padded=st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_batch_norm_is_torchs_on_the_rows_that_count(rows: int, seq: int, channels: int, padded: int) -> None:
    """Result, gradients and running statistics of three passes, and the evaluation behind them, are those of
    torch.nn.BatchNorm1d on the rows that do not only pad; a row that pads is normalised with the others' statistics."""
    if rows * seq < 2 or not channels:
        return
    theirs = torch.nn.BatchNorm1d(channels, momentum=0.3).double()
    weight, bias = (normal(channels, seed=i).requires_grad_() for i in (1, 2))
    with torch.no_grad():
        theirs.weight.copy_(weight)
        theirs.bias.copy_(bias)
    mean, variance = torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64)
    token_weights = torch.cat([torch.ones(rows, seq), torch.zeros(padded, seq)])
    for number in range(3):
        x = (3 * normal(rows + padded, seq, channels, seed=number) + 10).requires_grad_()
        grad = normal(rows, seq, channels, seed=9) * torch.ones(1)
        ours, new = Ops(weights=token_weights, train=True).batch_norm(x, weight, bias, mean, variance, momentum=0.3)
        wanted = theirs(x[:rows].flatten(0, 1)).view(rows, seq, channels)
        torch.testing.assert_close(ours[:rows], wanted, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(ours[:rows], [x, weight, bias], grad)
        expected = torch.autograd.grad(wanted, [x, theirs.weight, theirs.bias], grad)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        mean, variance = new["mean"], new["variance"]
        torch.testing.assert_close(mean, theirs.running_mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(variance, theirs.running_var, rtol=1e-12, atol=1e-12)
    theirs.eval()
    x = normal(2, seq, channels)
    ours, new = Ops().batch_norm(x, weight, bias, mean, variance)
    torch.testing.assert_close(ours, theirs(x.flatten(0, 1)).view_as(x), rtol=1e-12, atol=1e-12)
    assert new["mean"] is mean and new["variance"] is variance


def test_gradient_of_all_that_batch_norm_takes() -> None:
    """Derivatives, of rows that pad included, are those of finite differences."""
    token_weights = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    mean, variance = normal(3), normal(3).square()

    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return Ops(weights=token_weights, train=True).batch_norm(x, weight, bias, mean, variance)[0]

    assert torch.autograd.gradcheck(apply, [normal(*s).requires_grad_() for s in ((3, 2, 3), (3,), (3,))])


def test_batch_norm_of_large_values_keeps_their_variance() -> None:
    """In fp32, values of 10^4 with spread 1 are normalised as in fp64 up to their own rounding: no difference of large
    squares."""
    x = 1e4 + normal(64, 16, 3)
    one, zero = torch.ones(3), torch.zeros(3)
    single = x.float()
    _, new = Ops(train=True).batch_norm(single, one, zero, zero, one, momentum=1.0)
    torch.testing.assert_close(new["variance"], single.double().flatten(0, 1).var(0).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(0, 4), (3, 4)])
def test_a_microbatch_without_a_row_changes_nothing(shape: tuple[int, int]) -> None:
    """No row, or only rows that pad: the running statistics stay, bit by bit, and the result is finite."""
    mean, variance = normal(2), normal(2).square()
    ops = Ops(weights=torch.zeros(shape), train=True)
    out, new = ops.batch_norm(normal(*shape, 2), torch.ones(2), torch.zeros(2), mean, variance)
    assert torch.isfinite(out).all()
    assert torch.equal(new["mean"], mean) and torch.equal(new["variance"], variance)


def test_channels_may_have_several_axes() -> None:
    """Every axis beside batch and sequence is a channel's."""
    x, shape = normal(3, 2, 5, 4), (2, 4)
    ours, new = Ops(train=True).batch_norm(
        x, torch.ones(shape), torch.zeros(shape), torch.zeros(shape), torch.ones(shape), "batch kv_heads seq head_dim"
    )
    flat = F.batch_norm(x.permute(0, 2, 1, 3).reshape(15, 8), None, None, training=True)
    torch.testing.assert_close(ours.permute(0, 2, 1, 3).reshape(15, 8), flat)
    assert new["mean"].shape == shape


def reference(params: dict[str, torch.Tensor], tokens: torch.Tensor, train: bool) -> torch.Tensor:
    """The MLP language model in plain torch, apart from models/: concatenated embeddings, F.batch_norm in place."""

    def norm(x: torch.Tensor, at: str) -> torch.Tensor:
        of = [params[f"{at}.{n}"] for n in ("mean", "variance", "weight", "bias")]
        return F.batch_norm(x.flatten(0, 1), *of, training=train).view_as(x)

    taps = torch.cat([params[f"embed.taps.{i}"] for i in range(4)])
    padded = F.pad(params["embed.table"][tokens], (0, 0, 3, 0))
    last = torch.cat([padded[:, 3 - i : 3 - i + tokens.shape[1]] for i in range(4)], -1)
    x = torch.tanh(norm(last @ taps, "embed.norm")) @ params["embed.out"].T
    for i in range(CONFIG.layers):
        h = norm(x, f"blocks.{i}.norm") @ params[f"blocks.{i}.up"]
        x = x + torch.relu(h) @ params[f"blocks.{i}.down"].T
    return norm(x, "head.norm") @ params["head.unembed"].T


@pytest.mark.parametrize("train", [True, False])
def test_mlp_is_what_was_published(train: bool) -> None:
    """Logits, gradients and new running statistics are those of an implementation apart, and specs name all buffers."""
    model = load_model("mlp")
    specs = model.specs(CONFIG)
    held = {n: torch.full(b.shape, b.value, dtype=torch.float64) for n, b in buffers(specs).items()}
    params = {
        n: (p.mean + normal(*p.shape, seed=i)).requires_grad_() for i, (n, p) in enumerate(parameters(specs).items())
    }
    assert len(held) == 2 * (CONFIG.layers + 2)
    tokens = torch.randint(CONFIG.vocab, (3, CONFIG.seq), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens, tokens, torch.ones(3, CONFIG.seq), torch.arange(3))
    logits, new = forward_with_buffers(model, specs, params | held, batch, Ops(train=train))
    theirs = {n: b.clone() for n, b in held.items()}
    wanted = reference(params | theirs, tokens, train)
    torch.testing.assert_close(logits, wanted, rtol=1e-12, atol=1e-12)
    assert new.keys() == held.keys()
    for name, one in new.items():
        torch.testing.assert_close(one, theirs[name], rtol=1e-12, atol=1e-12)
        assert torch.equal(one, held[name]) is not train
    toward = normal(*logits.shape)
    for mine, yours in zip(
        *(torch.autograd.grad(y, list(params.values()), toward) for y in (logits, wanted)), strict=True
    ):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-10)


def test_evaluation_does_not_see_the_tokens_behind() -> None:
    """With running statistics, changing a token changes no logits before it."""
    model = load_model("mlp")
    specs = model.specs(CONFIG)
    held = {n: torch.full(b.shape, b.value, dtype=torch.float64) for n, b in buffers(specs).items()}
    params = {n: p.mean + normal(*p.shape) for n, p in parameters(specs).items()} | held
    tokens = torch.arange(6).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 3] = 9
    one, other = (
        forward_with_buffers(model, specs, params, Batch(t, t, torch.ones(1, 6), torch.zeros(1)), Ops())[0]
        for t in (tokens, changed)
    )
    assert torch.equal(one[:, :3], other[:, :3]) and not torch.equal(one[:, 3:], other[:, 3:])


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (Buffer("embed", (3, 4)), r"model specs: head\.b has axes 'embed' for shape \(3, 4\); name each dim\."),
        (Tied("head.c"), r"model specs: head\.b is tied to head\.c, which is no parameter\."),
    ],
)
def test_buffers_that_are_not_described_are_errors(leaf: object, said: str) -> None:
    """A buffer names each dim, and cannot be shared."""
    specs = {"embed": {"a": Param("embed", (3,))}, "blocks": [], "head": {"b": leaf, "c": Buffer("embed", (3,))}}
    with pytest.raises(ValueError, match=said):
        parameters(specs)
