"""Time of one optimizer step, beside torch's own ways to run the same model.

    python -m benchmarks.bench_step [--widths 64 256] [--peers ddp fsdp2] [--pairs 15] [--json]
    python -m benchmarks.bench_step --widths 256 --profile tp

A step is forward, backward, reduction, clipping by global norm 1, AdamW, all in fp32. Both sides start from the same
weights, take the same batch and read the loss once a step; their losses are compared first. The model is a Llama of 4
layers (vocabulary 256, 128 tokens in a sequence, heads of 32), on gloo ranks with one thread and one core each.

    torch   a plain module on one rank                            plan ddp, mesh 1
    ddp     DistributedDataParallel                               plan ddp, mesh 2
    fsdp2   fully_shard on each block and the root                plan fsdp, mesh 2
    tp      parallelize_module, vocabulary and loss split too     plan ddp, mesh 1x2 without sequence parallel
    tp+sp   the same with SequenceParallel norms                  plan ddp, mesh 1x2
"""

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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

from benchmarks.harness import Comparison, RunStep, compare, on_ranks, profile_beside, table
from dtengine.data import Batch
from dtengine.layout import make_plan
from dtengine.mesh import build_mesh, num_ranks, parse_mesh
from dtengine.model import ModelConfig, configure, load_model
from dtengine.optim import adamw
from dtengine.shard import gather
from dtengine.step import Step, StepConfig, init_state, make_step

LR = 1e-3
CLIP = 1.0
ROPE_THETA = 500_000.0
EPS = 1e-5


class Row(NamedTuple):
    """One peer and the plan that it is compared with."""

    plan: str
    mesh: str
    sequence_parallel: bool = False


ROWS = {
    "torch": Row("ddp", "1"),
    "ddp": Row("ddp", "2"),
    "fsdp2": Row("fsdp", "2"),
    "tp": Row("ddp", "1x2"),
    "tp+sp": Row("ddp", "1x2", sequence_parallel=True),
}


# --- the peer's model -----------------------------------------------------------------------------------------------


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


# --- the peers ------------------------------------------------------------------------------------------------------


def wrap_ddp(module: Llama, step: Step) -> nn.Module:
    """Wrap as torch's DDP notes advise; no buffer changes, so none is sent."""
    return DistributedDataParallel(
        module, forward_sync_buffers=False, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=25
    )


def wrap_fsdp2(module: Llama, step: Step) -> nn.Module:
    """Shard each block and the root; gathered parameters are kept for the backward pass where dtengine keeps them."""
    gathers = step.collectives()["dp"]["all_gather"]
    regathers = gathers > len(module.blocks) + 2
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=regathers)
    fully_shard(module, mesh=mesh, reshard_after_forward=False).set_force_sum_reduction_for_comms(
        True
    )  # gloo has no scaled sum
    return module


def wrap_tp(module: Llama, step: Step) -> nn.Module:
    """Parallelize as torch's tensor-parallel tutorial does, embedding and output split by vocabulary."""
    sequence = any(rule.logical == "res_seq" for rule in step.plan.compute.rules)
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


WRAP: dict[str, Callable[[Llama, Step], nn.Module]] = {
    "torch": lambda module, step: module,
    "ddp": wrap_ddp,
    "fsdp2": wrap_fsdp2,
    "tp": wrap_tp,
    "tp+sp": wrap_tp,
}


def clip_norm(parameters: list[nn.Parameter]) -> None:
    """Clip as clip_grad_norm_ does, with one reduction of the norm; foreach takes split and plain gradients apart."""
    split = [p for p in parameters if isinstance(p.grad, DTensor)]
    groups = [g for g in (split, [p for p in parameters if not isinstance(p.grad, DTensor)]) if g]
    norms = [get_total_norm([p.grad for p in group if p.grad is not None], foreach=True) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        clip_grads_with_norm_(group, CLIP, norm, foreach=True)


def peer_step(peer: str, step: Step, whole: dict[str, Tensor], config: ModelConfig, batch: Batch) -> RunStep:
    """Build a peer from dtengine's initial parameters and return its step."""
    module = Llama(config)
    copy_weights(module, whole)
    model = WRAP[peer](module, step)
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    context = loss_parallel if peer.startswith("tp") else nullcontext

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
            loss.backward()
        clip_norm(parameters)
        optimizer.step()
        return (loss.to_local() if isinstance(loss, DTensor) else loss).item()

    return run


# --- measuring ------------------------------------------------------------------------------------------------------


def sizes_of(width: int, layers: int) -> ModelConfig:
    """Return the model's sizes: heads of 32, but two at least; an MLP of 8/3 of the width, rounded up to 16."""
    heads = max(2, width // 32)
    return configure(
        load_model("llama"), "llama", layers=layers, embed=width, heads=heads, mlp=-(-width // 6) * 16, vocab=256,
        seq=128,
    )  # fmt: skip


def measure(peer: str, width: int, layers: int, num_sequences: int, pairs: int, profiled: bool) -> Comparison | str:
    """Compare dtengine with one peer; run by every rank.

    Args:
        num_sequences: global batch.
        profiled: return a table of operators instead of times.
    """
    row, config = ROWS[peer], sizes_of(width, layers)
    sizes = parse_mesh(row.mesh)
    plan = make_plan(row.plan, sizes, config.axis_sizes, sequence_parallel=row.sequence_parallel)
    mesh = build_mesh(sizes)
    share = num_sequences // plan.coordinates
    step_config = StepConfig(share, config.seq, clip=CLIP)
    step = make_step(load_model("llama"), config, plan, mesh, adamw(), step_config, lambda number: LR)
    state = init_state(step)
    step.prepare()
    whole = dict(zip(state.params, gather(list(state.params.values()), mesh), strict=True))

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab, (num_sequences, config.seq + 1), generator=generator)
    first = mesh.coordinate[mesh.axes.index("dp")] * share
    mine = tokens[first : first + share]
    rows = torch.arange(first, first + share)
    batch = Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), torch.ones(share, config.seq), rows)
    count = float(num_sequences * config.seq)

    def ours() -> float:
        nonlocal state
        state, metrics = step(state, batch, count)
        return metrics.loss.item()

    theirs = peer_step(peer, step, whole, config, batch)
    return profile_beside(theirs, ours) if profiled else compare(theirs, ours, pairs)


def main() -> None:
    """Measure every chosen peer at every chosen width."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_step", description="Time of one optimizer step.")
    parser.add_argument("--widths", type=int, nargs="+", default=[256], help="embed (default 256)")
    parser.add_argument("--peers", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument("--pairs", type=int, default=15, help="timed steps of each (default 15)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--sequences", type=int, help="global batch, even (default 2048 / width, at least 2)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--profile", choices=ROWS, metavar="PEER", help="show operators beside this peer's, no times")
    args = parser.parse_args()
    header = ("peer", "plan", "mesh", "width", "ranks", "peer ms", "dtengine ms", "ratio", "spread", "loss difference")
    lines: list[tuple[str, ...]] = [header]
    found: list[dict] = []
    for width in args.widths:
        for peer in [args.profile] if args.profile else args.peers:
            row = ROWS[peer]
            ranks = num_ranks(parse_mesh(row.mesh))
            num_sequences = args.sequences or max(2, 2048 // width)
            work = (peer, width, args.layers, num_sequences, args.pairs, bool(args.profile))
            result = on_ranks(measure, work, ranks)
            if args.profile:
                print(f"{peer}, width {width}: one step on rank 0, under the profiler\n{result}\n")
                continue
            timed = Comparison(*result)
            where = {"peer": peer, "plan": row.plan, "mesh": row.mesh, "width": width, "ranks": ranks}
            found.append({**where, "ratio": round(timed.ratio, 4), "spread": round(timed.spread, 4)})
            times = (f"{timed.peer_ms:.1f}", f"{timed.ours_ms:.1f}", f"{timed.ratio:.3f}", f"{timed.spread:.3f}")
            lines.append((*map(str, where.values()), *times, f"{timed.loss_difference:.1e}"))
    if lines[1:]:
        print(table(lines))
    if args.json:
        print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
