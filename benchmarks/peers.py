"""Torch's own ways to train a Llama: a plain module, what wraps it, and its training step.

Each is tuned as its documentation says; ``benchmarks/README.md`` says how.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # as torchtitan does
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dtengine.data import Batch
from dtengine.model import ModelConfig

LR = 1e-3
CLIP = 1.0
ROPE_THETA = 500_000.0
EPS = 1e-5
ADAMW = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
DECAY = 0.1  # of matrices alone


class Side(NamedTuple):
    """One side of a comparison on one rank.

    Attributes:
        run: takes one optimizer step and returns the loss that it read.
        tensors: lists the parameters, gradients and optimizer state that are alive; for counting their bytes.
    """

    run: Callable[[], float]
    tensors: Callable[[], list[Tensor]]


# --- the model ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions; the number of heads follows from the weights it holds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.heads * config.head_dim
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.embed, width, bias=False)
        self.k = nn.Linear(config.embed, width, bias=False)
        self.v = nn.Linear(config.embed, width, bias=False)
        self.out = nn.Linear(width, config.embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of dims (i, i + head_dim/2) of [batch, heads, seq, head_dim] by tables [seq, head_dim/2]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # under autocast the tables are wider than what they turn
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.embed, config.mlp, bias=False)
        self.up = nn.Linear(config.embed, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.embed, EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.embed, EPS)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The model of dtengine/models/llama.py as a plain module, with its rotary tables made once."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, EPS)
        self.unembed = nn.Linear(config.embed, config.vocab, bias=False)
        half = config.head_dim // 2
        angle = torch.outer(torch.arange(config.seq).float(), ROPE_THETA ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.unembed(self.norm(x))


@torch.no_grad()
def copy_weights(module: Llama, whole: dict[str, Tensor]) -> None:
    """Give the module dtengine's initial parameters: [embed, out axes], but [embed, in axes] for out and down."""
    for name, value in whole.items():
        path = name.removeprefix("embed.").removeprefix("head.").replace(".norm", "_norm")
        if value.dim() > 1:
            value = value.flatten(1)
        if name.rpartition(".")[2] in ("q", "k", "v", "gate", "up"):
            value = value.t()
        module.get_parameter(f"{path}.weight").copy_(value)


# --- what wraps it --------------------------------------------------------------------------------------------------


def wrap_nothing(module: Llama) -> nn.Module:
    """Leave the module as it is, for one rank."""
    return module


def wrap_ddp(
    module: Llama, *, bucket_mb: float = 25, static_graph: bool = True, compiled: bool = False
) -> DistributedDataParallel:
    """Wrap as torch's DDP notes advise; no buffer changes, so none is sent.

    Args:
        bucket_mb: size of a gradient bucket, 2^20 bytes; 25 is torch's default.
        static_graph: every step uses the same parameters.
        compiled: torch.compile the wrapped module, which splits its graph at the buckets.
    """
    model = DistributedDataParallel(
        module,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        bucket_cap_mb=bucket_mb,  # type: ignore[arg-type]  # documented as a number of MiB
    )
    return torch.compile(model) if compiled else model  # type: ignore[return-value]


def wrap_fsdp2(
    module: Llama, *, reshard: bool = True, prefetch: bool = False, recompute: bool = False, bf16: bool = False
) -> nn.Module:
    """Shard each block and the root; the root stays gathered, as is its default.

    Args:
        reshard: free a block's gathered parameters after its forward pass and gather them again in the backward pass.
        prefetch: issue the next block's gather before a block's forward pass, and the one before in the backward pass.
        recompute: keep only a block's input, and run it again in the backward pass.
        bf16: gather and compute in bfloat16, reduce gradients in float32.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if bf16 else MixedPrecisionPolicy()
    if recompute:  # inside fully_shard, so that a block is gathered once for recomputing and backward together
        module.blocks = nn.ModuleList(checkpoint_wrapper(b, preserve_rng_state=False) for b in module.blocks)
    blocks = [fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy) for block in module.blocks]
    root = fully_shard(module, mesh=mesh, mp_policy=policy)
    if prefetch:
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    for part in (root, *blocks):
        part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return module


def wrap_tp(module: Llama, *, sequence: bool = False) -> nn.Module:
    """Parallelize as torch's tensor-parallel tutorial does, embedding and output split by vocabulary."""
    stream = Shard(1) if sequence else Replicate()
    whole = PrepareModuleInput(input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None))
    whole_mlp = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    styles = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "unembed": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        styles["norm"] = SequenceParallel()
    parallelize_module(module, mesh, styles)
    for block in module.blocks:
        styles = {
            **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
            **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
            "attention.out": RowwiseParallel(output_layouts=stream),
            "mlp.down": RowwiseParallel(output_layouts=stream),
        }
        if sequence:
            styles |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
            styles |= {"attention": whole, "mlp": whole_mlp}
        parallelize_module(block, mesh, styles)
    return module


# --- the step -------------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without its history."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def clip_norm(parameters: list[nn.Parameter]) -> None:
    """Clip as clip_grad_norm_ does, with one reduction of the norm; foreach takes split and plain gradients apart."""
    split = [p for p in parameters if isinstance(p.grad, DTensor)]
    groups = [g for g in (split, [p for p in parameters if not isinstance(p.grad, DTensor)]) if g]
    norms = [get_total_norm([p.grad for p in group if p.grad is not None], foreach=True) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        clip_grads_with_norm_(group, CLIP, norm, foreach=True)


def decay_groups(parameters: Sequence[nn.Parameter]) -> list[dict]:
    """Return AdamW's groups: matrices decay, vectors do not."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def tensors_of(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List this rank's parts of parameters, gradients and optimizer state."""
    slots = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return [local(t) for t in (*parameters, *(p.grad for p in parameters if p.grad is not None), *slots)]


def peer_side(
    model: nn.Module, batches: Sequence[Batch], *, zero: bool = False, autocast: bool = False, split_loss: bool = False
) -> Side:
    """Return a peer's training step.

    Args:
        model: a Llama in its wrapper.
        batches: this rank's microbatches; only the last one synchronises (DDP's no_sync).
        zero: split the optimizer state with ZeroRedundancyOptimizer.
        autocast: forward pass in bfloat16 where autocast says so; parameters, gradients and optimizer stay float32.
        split_loss: logits are split by vocabulary.
    """
    # 1. optimizer; 2. one step; 3. what it holds
    parameters = list(model.parameters())
    groups = decay_groups(parameters)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns that torch.jit is deprecated

        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(groups, **ADAMW)

    def silent(number: int) -> AbstractContextManager:
        return model.no_sync() if number + 1 < len(batches) else nullcontext()  # type: ignore[operator]

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            with silent(number), loss_parallel() if split_loss else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(batch.tokens)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten()) / len(batches)
                loss.backward()
            total += local(loss)
        clip_norm(parameters)
        optimizer.step()
        return total.item()

    inner = getattr(optimizer, "optim", optimizer)  # what ZeroRedundancyOptimizer shards
    return Side(run, lambda: tensors_of(parameters, inner))
