"""What a model is: plain functions and descriptions of its parameters.

    Model(specs, embed, block, head)
    specs(config)               -> {"embed": {...}, "blocks": [{...}, ...], "head": {...}}, a tree of Param, Tied, Buffer
    embed(params, batch, ops)   -> x  [batch, res_seq, embed]      with params["embed"]
    block(params, x, ops)       -> x                               with one of params["blocks"]
    head(params, x, ops)        -> logits [batch, seq, vocab]      with params["head"]

Pipelines cut, recompute and prefetch at blocks, so the engine calls the three functions itself and moves each part's
parameters from the layout they are stored in to the one they are used in; model code never sees that.

A part with buffers (batch-norm statistics) finds their values among its params, and returns (result, {name: new value}):
a tree of the same names, with those that it changes. Nothing is changed in place, and no gradient goes into one.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dtengine import trees
from dtengine.data import Batch
from dtengine.layout import Axes, axes_of
from dtengine.ops import Ops

BUILT_IN = ("gpt", "llama", "mlp")


@dataclass(frozen=True)
class Param:
    """One parameter: its logical axes, global shape, and how it starts.

    Attributes:
        axes: "vocab embed", one name for each dim.
        shape: global sizes.
        std: standard deviation of the initial normal draw, 0 for a constant.
        mean: constant that the parameter starts from.
        decay: whether weight decay applies; None means: to matrices (std > 0 and two dims or more).
    """

    axes: str
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    decay: bool | None = None

    @property
    def names(self) -> Axes:
        """The logical axes as a tuple."""
        return axes_of(self.axes)

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: by default not to norms and biases, which start constant."""
        return self.std > 0 and len(self.shape) > 1 if self.decay is None else self.decay


@dataclass(frozen=True)
class Tied:
    """A use of another part's parameter: one logical parameter, one gradient, one optimizer state."""

    name: str  # dotted: "embed.table"


@dataclass(frozen=True)
class Buffer:
    """A value that a model carries from pass to pass without learning it: its logical axes, global shape, and start.

    It has no gradient and no optimizer state, is not in the norm and does not decay. It lies as the compute layout says
    for its axes, in fp32 (fp64 where computed so), and every microbatch takes it as the one before left it.
    """

    axes: str
    shape: tuple[int, ...]
    value: float = 0.0

    @property
    def names(self) -> Axes:
        """The logical axes as a tuple."""
        return axes_of(self.axes)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model. ``None`` is filled in from the model's defaults (see ``Model.configure``).

    Attributes:
        layers: number of blocks.
        embed: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads; divides heads.
        head_dim: width of one head.
        mlp: hidden width of the MLP.
        vocab: number of token ids.
        seq: tokens in a sequence.
        dropout: probability in [0, 1).
        tied: whether the output matrix is the embedding table.
    """

    layers: int = 2
    embed: int = 64
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    mlp: int = 256
    vocab: int = 256
    seq: int = 128
    dropout: float = 0.0
    tied: bool = False

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the logical axes that a plan's head rule needs."""
        return {"kv_heads": self.kv_heads, "q_per_kv": self.q_per_kv}


@dataclass(frozen=True)
class Model:
    """A model as a value; see the module docstring for the contract of the four functions.

    Attributes:
        loss: (logits, batch, ops) -> (sum of weighted token losses, sum of weights).
        sizes: {published name: config fields} for ``--size``.
        defaults: config fields where neither ``--size`` nor an option says otherwise.
        whole_axes: logical axes of its own; they are never split.
    """

    specs: Callable[[ModelConfig], dict[str, Any]]
    embed: Callable[[Any, Batch, Ops], Tensor | tuple[Tensor, Any]]
    block: Callable[[Any, Tensor, Ops], Tensor | tuple[Tensor, Any]]
    head: Callable[[Any, Tensor, Ops], Tensor | tuple[Tensor, Any]]
    loss: Callable[[Tensor, Batch, Ops], tuple[Tensor, Tensor]] = lambda logits, batch, ops: ops.cross_entropy(
        logits, batch.targets, batch.weights
    )
    sizes: Mapping[str, Mapping[str, Any]] | None = None
    defaults: Mapping[str, Any] | None = None
    whole_axes: tuple[str, ...] = ()


def configure(model: Model, name: str, size: str | None = None, **given: Any) -> ModelConfig:
    """Resolve a model's sizes from its defaults, a published size and single options, in that order.

    Raises:
        ValueError: unknown size, sizes below 1, heads that kv_heads does not divide, embed that heads does not divide
            (where head_dim is not given), dropout outside [0, 1).
    """
    values: dict[str, Any] = dict(model.defaults or {})
    if size is not None:
        sizes = model.sizes or {}
        if size not in sizes:
            raise ValueError(f"--size {size}: {name} has no such size. Use one of {', '.join(sizes) or '(none)'}.")
        values |= sizes[size]
    chosen = {k: v for k, v in given.items() if v is not None}
    values |= chosen
    if "heads" in chosen and "kv_heads" not in chosen:
        values["kv_heads"] = chosen["heads"]
    values.setdefault("heads", ModelConfig.heads)
    values.setdefault("kv_heads", values["heads"])
    unknown = sorted(set(values) - {f.name for f in fields(ModelConfig)})
    if unknown:
        raise ValueError(f"--model {name}: its sizes name {', '.join(unknown)}, which ModelConfig does not have.")
    config = ModelConfig(**values)
    wrong = [f"--{k.replace('_', '-')} {values[k]}" for k in _COUNTS if k in values and values[k] < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: sizes are whole numbers of at least 1.")
    if config.heads % config.kv_heads:
        raise ValueError(
            f"--kv-heads {config.kv_heads}: does not divide --heads {config.heads}; each key head serves equally many "
            f"query heads. Use one of {', '.join(map(str, _divisors(config.heads)))}."
        )
    if "head_dim" not in values:
        if config.embed % config.heads:
            raise ValueError(
                f"--embed {config.embed}: --heads {config.heads} does not divide it; without --head-dim a head is embed / "
                f"heads wide. Use --embed {config.embed + -config.embed % (2 * config.heads)}, or give --head-dim."
            )
        config = replace(config, head_dim=config.embed // config.heads)
    if "mlp" not in values:
        config = replace(config, mlp=4 * config.embed)
    if not 0 <= config.dropout < 1:
        raise ValueError(f"--dropout {config.dropout}: a probability from 0 up to, not including, 1.")
    return config


_COUNTS = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "seq")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def load_model(name: str) -> Model:
    """Load a built-in model by name, or a person's own as "path/to/file.py:name".

    Raises:
        ValueError: unknown name, missing file, no such value in it, or a value that is no Model.
    """
    if ":" not in name and not name.endswith(".py"):
        if name not in BUILT_IN:
            raise ValueError(
                f"--model {name}: no such model. Use {', '.join(BUILT_IN)}, or a file of your own as "
                "path/to/file.py:name."
            )
        return importlib.import_module(f"dtengine.models.{name}").MODEL
    path, _, value = name.rpartition(":") if ":" in name else (name, "", "MODEL")
    if not Path(path).is_file():
        raise ValueError(f"--model {name}: there is no file {path}. Give path/to/file.py:name.")
    spec = importlib.util.spec_from_file_location(f"dtengine_model_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--model {name}: {path} is not a Python file. Give path/to/file.py:name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--model {name}: {path} fails to load: {type(error).__name__}: {error}") from error
    model = getattr(module, value, None)
    if not isinstance(model, Model):
        models = [k for k, v in vars(module).items() if isinstance(v, Model)]
        raise ValueError(
            f"--model {name}: {value} in {path} is {'missing' if model is None else 'no dtengine.Model'}. "
            f"Models in it: {', '.join(models) or 'none'}."
        )
    return model


def parameters(specs: Mapping[str, Any]) -> dict[str, Param]:
    """Return {dotted name: Param} without the tied uses and the buffers.

    Raises:
        ValueError: a part is missing, a leaf is no Param, Tied or Buffer, axes and shape differ in length, or a Tied names
            no parameter.
    """
    missing = [part for part in ("embed", "blocks", "head") if part not in specs]
    if missing:
        raise ValueError(f"model specs: no {', '.join(missing)}; a model has the parts embed, blocks and head.")
    flat = trees.flatten(specs)
    params = {name: leaf for name, leaf in flat.items() if isinstance(leaf, Param)}
    for name, leaf in flat.items():
        if isinstance(leaf, Tied) and leaf.name not in params:
            raise ValueError(f"model specs: {name} is tied to {leaf.name}, which is no parameter.")
        if not isinstance(leaf, Param | Tied | Buffer):
            raise ValueError(
                f"model specs: {name} is a {type(leaf).__name__}; every leaf is a Param, a Tied or a Buffer."
            )
        if isinstance(leaf, Param | Buffer) and len(leaf.names) != len(leaf.shape):
            raise ValueError(f"model specs: {name} has axes '{leaf.axes}' for shape {leaf.shape}; name each dim.")
    return params


def buffers(specs: Mapping[str, Any]) -> dict[str, Buffer]:
    """Return {dotted name: Buffer}."""
    return {name: leaf for name, leaf in trees.leaves(specs) if isinstance(leaf, Buffer)}


def split_result(result: Any) -> tuple[Any, dict[str, Any]]:
    """Split what a part returned into its result and {name within the part: new value of a buffer}."""
    value, new = result if isinstance(result, tuple) else (result, {})
    return value, trees.flatten(new)


def forward(model: Model, specs: Mapping[str, Any], params: Mapping[str, Tensor], batch: Batch, ops: Ops) -> Tensor:
    """Return the logits [batch, seq, vocab] of whole parameters on one device; the composition of the parts.

    Args:
        params: {dotted name: tensor}, as ``parameters`` and ``buffers`` name them.
    """
    return forward_with_buffers(model, specs, params, batch, ops)[0]


def forward_with_buffers(
    model: Model, specs: Mapping[str, Any], params: Mapping[str, Tensor], batch: Batch, ops: Ops
) -> tuple[Tensor, dict[str, Tensor]]:
    """As ``forward``; returns (logits, {dotted name: new value} of the buffers that changed)."""
    tree = trees.map_named(lambda name, leaf: params[leaf.name if isinstance(leaf, Tied) else name], dict(specs))
    new: dict[str, Tensor] = {}

    def run(name: str, function: Callable, params: Any, x: Any) -> Tensor:
        value, changed = split_result(function(params, x, ops.at(name)))
        new.update({f"{name}.{n}": one for n, one in changed.items()})
        return value

    x = run("embed", model.embed, tree["embed"], batch)
    for i, block in enumerate(tree["blocks"]):
        x = run(f"blocks.{i}", model.block, block, x)
    return run("head", model.head, tree["head"], x), new
