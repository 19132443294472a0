"""Pipelines compute what one device computes, for any schedule, cut and composition; their runs are as any other."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from commands import run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_cases import G, L, case
from test_equivalence import (
    SGD,
    assert_same_bits,
    batches_of,
    check_equal,
    command_of,
    num_ranks_of,
    parsed,
    run_plan,
    setup_of,
    step_of,
)

from benchmarks.peers import Llama
from dtengine import checkpoint, executors
from dtengine.layout import PLANS
from dtengine.memory import bytes_of, key_of
from dtengine.mesh import build_mesh
from dtengine.optim import sgd
from dtengine.options import BatchOptions, MeshOptions, ModelOptions, PipelineOptions
from dtengine.pipeline.actions import Action, result
from dtengine.pipeline.communication import receiver
from dtengine.pipeline.messages import Messages
from dtengine.pipeline.schedules import FIXED_CHUNKS, SCHEDULES, make
from dtengine.pipeline.simulate import Costs, simulate
from dtengine.pipeline.step import PipelineStep
from dtengine.step import init_state
from dtengine.trace_cache import TraceCache
from dtengine.verify import VerifyOptions

if TYPE_CHECKING:
    from tests.ranks_pool import Pool

TRAIN = "dtengine.train"
QUICK = "--layers 4 --embed 16 --heads 2 --mlp 24 --seq 16 --global-batch 8 --sample 0 --no-memory-report --eval-sequences 8"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_exact(pool: Pool, name: str) -> None:
    """Two ranks, four microbatches, a tied weight, dropout and rows that only pad: loss, raw gradients, norm, parameters."""
    check_equal(pool, case(L, "pp=2", layers=5, tied=True, dropout=0.2, microbatches=4, schedule=name))


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [*(("pp=2,dp=2", plan) for plan in PLANS), ("pp=2,rep=2,tp=2", "zero1"), ("pp=2,rep=2,tp=2", "fsdp")],
)
def test_every_plan_within_a_stage_is_exact(pool: Pool, mesh: str, plan: str) -> None:
    """Each plan, with sequence parallelism and split weights, within stages of a zero-bubble V."""
    check_equal(pool, case(G, mesh, plan, layers=3, tied=True, microbatches=3, schedule="zbv"))


@pytest.mark.parametrize(
    "arguments",
    [
        "--mesh pp=4 --layers 1 --microbatches 2",  # stages without layers, fewer microbatches than ranks
        "--mesh pp=3,dp=2 --schedule zb-h2 --layers 7 --microbatches 5 --global-batch 3",
        "--mesh 2x2x2 --schedule interleaved --chunks 3 --layers 4 --microbatches 3 --no-sp --tied",
        "--mesh pp=2,dp=2 --model mlp --plan zero1 --microbatches 3 --schedule zb-h1",  # statistics of stages
        "--mesh pp=4 --stage-layers 0,3,0,2 --layers 5 --microbatches 4 --schedule zb-h1 --model gpt",
        "--mesh pp=2 --microbatches 3 --eager --tied",
        "--mesh pp=2 --schedule auto --microbatches 5 --chunks 2 --layers 5",
        "--mesh pp=2,dp=2 --precision fp16 --microbatches 2 --layers 2",
        "--mesh pp=2,tp=2 --precision bf16 --plan zero2 --microbatches 2 --layers 2",
    ],
)
def test_corners_are_exact(pool: Pool, arguments: str) -> None:
    """Cuts, models and precisions that the others leave out."""
    check_equal(pool, parsed(arguments))


@st.composite
def cases(draw: st.DrawFn) -> VerifyOptions:
    """Draw a pipeline: ranks, schedule, cut, microbatches, plan and model."""
    pp, dp, tp = draw(st.sampled_from([(2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1), (4, 1, 1)]))
    name = draw(st.sampled_from(list(SCHEDULES)))
    chunks = None if name in FIXED_CHUNKS else draw(st.integers(1, 3))
    microbatches, layers = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    stages = make(name, pp, microbatches, chunks).num_stages
    ends = [0, *sorted(draw(st.integers(0, layers)) for _ in range(stages - 1)), layers]
    uneven = ",".join(str(b - a) for a, b in itertools.pairwise(ends))
    heads, kv_heads = draw(st.sampled_from(((6, 3), (4, 1), (1, 1))))
    return replace(
        VerifyOptions(),
        mesh=MeshOptions(
            mesh=f"pp={pp},dp={dp},tp={tp}",
            plan=draw(st.sampled_from(tuple(PLANS))),  # type: ignore[arg-type]
            sp=draw(st.booleans()),
            backend="gloo",
        ),
        model=ModelOptions(
            model=draw(st.sampled_from(("llama", "gpt", "mlp"))),
            layers=layers,
            embed=draw(st.sampled_from((30, 7))),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=6,
            mlp=26,
            vocab=67,
            seq=draw(st.sampled_from((15, 3))),
            dropout=draw(st.sampled_from((0.0, 0.2))),
            tied=draw(st.booleans()),
        ),
        batch=BatchOptions(global_batch=draw(st.integers(1, 9)), microbatches=microbatches),
        optimizer=replace(
            SGD, steps=2, momentum=draw(st.sampled_from((0.0, 0.9))), clip_order=draw(st.sampled_from("12"))
        ),
        program=replace(
            VerifyOptions().program,
            recompute=draw(st.sampled_from(("none", "full", "selective"))),
            save=draw(st.sampled_from(("all", "min-cut"))),
            offload=draw(st.sampled_from(("none", "none", "optimizer"))),
        ),
        pipeline=PipelineOptions(name, chunks, draw(st.sampled_from((None, uneven)))),
    )


@pytest.mark.timeout(900)
def test_any_pipeline_equals_one_device(pool: Pool) -> None:
    """The property of every plan, for stages."""

    @settings(max_examples=max(2, settings.default.max_examples // 6))  # type: ignore[union-attr]
    @given(options=cases())
    @example(parsed("--mesh pp=2,dp=2 --schedule interleaved-zb --layers 3 --microbatches 5 --global-batch 1 --tied"))
    def check(options: VerifyOptions) -> None:
        check_equal(pool, options)

    check()


@pytest.mark.parametrize("order", ["1", "2", "inf"])
def test_c01_clipping_spans_the_stages(pool: Pool, order: str) -> None:
    """C01: the norm before clipping is that of the whole model, for any order; so are clipped gradients."""
    report = check_equal(
        pool, case(G, "pp=2", layers=3, microbatches=2, clip_order=order, clip=0.1, tied=True, steps=2)
    )
    assert report.norm <= 1e-9


def test_c05_schedules_scale_gradients_alike(pool: Pool) -> None:
    """C05: schedules that go through microbatches in the same order give the same bits, whatever they put off."""
    options = case(L, "pp=2", layers=4, microbatches=4)
    found = []
    for name in ("1f1b", "zb-h1", "zb-h2"):
        one = replace(options, pipeline=PipelineOptions(name))
        found.append(pool.run(num_ranks_of(one), run_plan, one)[0][0])
    for other in found[1:]:
        assert_same_bits(found[0], other)


def run_edges(rank: int, options: VerifyOptions) -> bool:
    """Whether a step gives the same bits where each direction of each pair of stages has a group of its own."""
    setup, found = setup_of(options), []
    for edges in (False, True):
        mesh = build_mesh(setup.plan.sizes, edges=edges)
        assert mesh.pipe is not None and len(mesh.pipe.edges) == (2 * (mesh.pipe.size - 1) if edges else 0)
        step = setup.bind(mesh, sgd(), lambda _: 0.1)
        state, _ = step(init_state(step), batches_of(setup, mesh, options.check), 100.0)
        found.append([p.to_local() for p in state.params.values()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_group_for_each_direction_gives_the_same_bits(pool: Pool) -> None:
    """As NCCL needs it: messages that cross on their way do not wait for each other."""
    for name in ("zbv", "interleaved"):
        assert all(pool.run(4, run_edges, case(L, "pp=2,dp=2", layers=4, microbatches=4, schedule=name)))


def run_recompute(rank: int, options: VerifyOptions) -> list[list[torch.Tensor]]:
    """Parameters after two steps with each way to recompute."""
    found = []
    for recompute, save in (("none", "all"), ("full", "all"), ("selective", "all"), ("none", "min-cut")):
        one = replace(options, program=replace(options.program, recompute=recompute, save=save))
        setup, mesh, step = step_of(one)
        state = init_state(step)
        for _ in range(2):
            state, _ = step(state, batches_of(setup, mesh, one.check), 100.0)
        found.append([p.to_local().clone() for p in state.params.values()])
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_c08_recompute_is_bit_neutral(pool: Pool, name: str) -> None:
    """C08: with dropout 0.1, what blocks compute again inside stages changes no bit."""
    options = case(G, "pp=2", layers=4, microbatches=3, dropout=0.1, schedule=name)
    for none, *others in pool.run(2, run_recompute, options):
        assert all(torch.equal(a, b) for other in others for a, b in zip(none, other, strict=True))


def run_saved(rank: int, options: VerifyOptions) -> int:
    """Bytes that a stage keeps of a microbatch for its backward."""
    step = step_of(options)[2]
    assert isinstance(step, PipelineStep)
    step.prepare()
    (made,) = step.traced.values()
    (output,) = made.pieces["F"].program.graph.graph.find_nodes(op="output")
    nodes = [n for name, n in zip(made.pieces["F"].gives, output.args[0], strict=True) if name in made.saved]
    held = {key_of(n)[0]: n.meta["val"].untyped_storage().nbytes() for n in nodes}
    return sum(size for root, size in held.items() if root.op != "placeholder" or root.name == "x")


@pytest.mark.parametrize(("save", "share"), [("all", 1.0), ("min-cut", 0.6)])
def test_min_cut_saves_little(pool: Pool, save: str, share: float) -> None:
    """``--save min-cut`` keeps at most 0.6 of the bytes that eager autograd keeps of a plain module, in both stages."""
    options = case(L, "pp=2", layers=4, microbatches=2, global_batch=4, save=save, precision="fp32", seq=64, embed=64,
                   heads=4, kv_heads=4, head_dim=16, mlp=172, vocab=64, dropout=0.0)  # fmt: skip
    mine = sum(pool.run(2, run_saved, options))
    config = setup_of(options).model_config
    plain, tokens, kept = Llama(config), torch.randint(0, 64, (2, 64)), []
    known = {t.untyped_storage().data_ptr() for t in (*plain.parameters(), *plain.buffers(), tokens)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.nn.functional.cross_entropy(plain(tokens).flatten(0, 1), tokens.flatten())
    print(f"{save}: {mine} bytes, eager {bytes_of(kept)}: {mine / bytes_of(kept):.3f}")
    assert 0 < mine <= share * bytes_of(kept)


def run_overflow(rank: int, options: VerifyOptions) -> tuple[list[float], list[float], bool]:
    """Inf in one gradient of the second stage in the first of two steps: (scales, finite, whether the first one changed
    a parameter)."""
    setup, mesh, step = step_of(options)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    step.prepare()
    update = step.programs["step"]

    def with_inf(*tensors: torch.Tensor) -> list[torch.Tensor]:
        if rank == 1:
            with torch.inference_mode():
                next(flat for flat in step.sums.values() if flat.numel())[0] = float("inf")
        return update(*tensors)

    before = [p.to_local().clone() for p in state.params.values()]
    step.programs["step"] = with_inf
    state, first = step(state, batches, 100.0)
    changed = any(not torch.equal(a, b.to_local()) for a, b in zip(before, state.params.values(), strict=True))
    assert state.scale is not None
    scales = [state.scale[0].item()]
    step.programs["step"] = update
    state, second = step(state, batches, 100.0)
    assert state.scale is not None
    return [*scales, state.scale[0].item()], [first.finite.item(), second.finite.item()], changed


def test_c36_an_overflow_in_one_stage_is_skipped_by_all(pool: Pool) -> None:
    """C36: all stages skip the step and halve the loss scale."""
    options = case(G, "pp=2", layers=2, microbatches=2, precision="fp16", loss_scale=1024.0)
    for answer in pool.run(2, run_overflow, options):
        assert answer == ([512.0, 512.0], [0.0, 1.0], False)


def run_activations(rank: int, options: VerifyOptions) -> int:
    """Bytes of activations at the peak of a step."""
    step = step_of(options)[2]
    step.prepare()
    memory = step.memory()
    assert memory is not None
    return memory.activations


def test_c31_bytes_do_not_grow_with_microbatches(pool: Pool) -> None:
    """C31: with 1f1b the bytes of activations are the same for 8 microbatches and for 32; with gpipe they are not."""
    found = {}
    for schedule, microbatches in itertools.product(("1f1b", "gpipe"), (8, 32)):
        options = case(G, "pp=4", layers=4, microbatches=microbatches, global_batch=microbatches, schedule=schedule)
        found[schedule, microbatches] = pool.run(4, run_activations, options)
    assert found["1f1b", 8] == found["1f1b", 32]
    assert all(more > 3 * few for few, more in zip(found["gpipe", 8], found["gpipe", 32], strict=True))


def run_overlap(rank: int, options: VerifyOptions) -> list[tuple[str, float, float, float]]:
    """For each message that a rank receives in a real step: (receive, when it was sent, seconds of compute that ran here
    between that and its use, seconds waited for it)."""
    setup, mesh, step = step_of(options)
    assert isinstance(step, PipelineStep)
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    for _ in range(2):
        state, _ = step(state, batches, 100.0)
    waits: dict[Action, float] = {}
    take = Messages.take

    def timed_take(self: Messages, receive: Action) -> torch.Tensor:
        began = time.perf_counter()
        value = take(self, receive)
        waits[receive] = time.perf_counter() - began
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Messages, "take", timed_take)
        _, _, seen = step.timed(state, batches, 100.0)
    events = seen.events[rank]
    found = []
    for move in seen.transfers:
        if move.destination == rank:
            computed = sum(max(0.0, min(e.end, move.end) - max(e.start, move.start)) for e in events)
            receive = receiver(result(move.action)._replace(kind=f"SEND_{'F' if move.action.kind == 'F' else 'B'}"))
            found.append((str(receive), move.start, computed, waits[receive]))
    return found


def test_transfers_overlap_with_compute(pool: Pool) -> None:
    """By timestamps of two ranks: outputs that were sent while the next stage computed are there when it wants them."""
    options = case(L, "pp=2", layers=4, embed=128, mlp=256, seq=64, microbatches=6, global_batch=12, schedule="gpipe")
    options = replace(options, program=replace(options.program, precision="fp32"))
    found = pool.run(2, run_overlap, options)[1]
    assert [name for name, *_ in found] == [f"1RECV_F{k}" for k in range(6)]
    hidden = [(computed, waited) for _, _, computed, waited in found[1:] if computed > 0.001]
    assert hidden, found  # messages that travelled while this rank computed
    assert min(waited / computed for computed, waited in hidden) < 0.2, found


def run_compiled(rank: int, options: VerifyOptions) -> dict[str, list[str]]:
    """The compiled regions that each piece calls; Inductor itself is left out."""

    def region(module: Any, nodes: Any, inputs: Any, results: Any) -> torch.nn.Module:
        return torch.nn.Module()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "compile_region", region)
        step = step_of(options)[2]
        assert isinstance(step, PipelineStep)
        step.prepare()
    (made,) = step.traced.values()
    return {
        kind: [str(n.target) for n in piece.program.graph.graph.nodes if n.op == "call_module"]
        for kind, piece in made.pieces.items()
    }


def test_a_compiled_forward_runs_once(pool: Pool) -> None:
    """A backward takes what the compiled forward of its blocks handed out, and calls none of them again."""
    for called in pool.run(2, run_compiled, case(L, "pp=2", layers=4, microbatches=2, compile=True)):
        assert len(called["F"]) == len(called["B"]) == 3  # two blocks, and embedding or head
        assert all(name.startswith("forward") for name in called["F"])
        assert all(name.startswith("backward") for name in called["B"])


def run_cached(rank: int, options: VerifyOptions, folder: str) -> tuple[set[str], list[bytes]]:
    """Two steps and an evaluation with a cache of programs: (what came from it, all bits)."""
    setup = setup_of(options)
    mesh = build_mesh(setup.plan.sizes)
    step = setup.bind(mesh, sgd(0.9, 0.0), lambda _: 0.1, cache=TraceCache(Path(folder)))
    state, batches = init_state(step), batches_of(setup, mesh, options.check)
    for _ in range(2):
        state, _ = step(state, batches, 100.0)
    loss = torch.tensor(step.evaluate(state, batches))
    tensors = [loss, *(p.to_local() for p in state.params.values())]
    return step.recalled, [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


def test_a_second_start_traces_nothing(pool: Pool, tmp_path: Path) -> None:
    """Stages come from the cache, bit by bit; another schedule, with other pieces, does not."""
    options = case(L, "pp=2,tp=2", "ddp", layers=5, microbatches=3, schedule="zbv", tied=True, sp=False)
    first = pool.run(4, run_cached, options, str(tmp_path))
    second = pool.run(4, run_cached, options, str(tmp_path))
    assert all(not recalled for recalled, _ in first)
    assert all(
        {f"F of stage {n}" for n in stages} | {"step"} <= second[rank][0] for rank, stages in ((0, (0, 3)), (2, (1, 2)))
    )
    assert [bits for _, bits in first] == [bits for _, bits in second]
    other = replace(options, pipeline=replace(options.pipeline, schedule="interleaved"))
    assert all(not recalled - {"step", "gather"} for recalled, _ in pool.run(4, run_cached, other, str(tmp_path)))


def run_live(rank: int, options: VerifyOptions) -> tuple[list[int], int]:
    """(microbatches alive at each action of a real step, the most that the simulator counts)."""
    setup, mesh, step = step_of(options)
    assert isinstance(step, PipelineStep)
    state, batches, counts = init_state(step), batches_of(setup, mesh, options.check), []
    forward, backward = step._run_forward, step._run_backward
    live = set()

    def noting_forward(stage: Any, whole: Any, running: Any, x: Any, batch: Any, key: Any) -> Any:
        result, values = forward(stage, whole, running, x, batch, key)
        live.add(id(values))
        counts.append(len(live))
        return result, values

    def noting_backward(stage: Any, kind: str, whole: Any, values: Any, grad: Any) -> Any:
        found = backward(stage, kind, whole, values, grad)
        if kind in "BW":
            live.discard(id(values))
        return found

    step._run_forward, step._run_backward = noting_forward, noting_backward  # type: ignore[method-assign]
    step(state, batches, 100.0)
    assert setup.schedule is not None
    return counts, rank


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h2", "zbv", "dualpipev"])
def test_as_much_is_alive_as_simulated(pool: Pool, name: str) -> None:
    """The most stage-microbatches that a rank holds in a real step are those that the simulator counts."""
    options = case(L, "pp=2", layers=4, microbatches=6, global_batch=6, schedule=name)
    simulated = simulate(make(name, 2, 6), Costs()).peak_live
    for counts, rank in pool.run(2, run_live, options):
        assert max(counts) == simulated[rank]


@pytest.mark.parametrize("microbatches", [4, 12])
def test_c31_1f1b_keeps_no_more_than_there_are_stages_to_the_end(pool: Pool, microbatches: int) -> None:
    """C31: rank r of p holds at most p - r microbatches, however many there are."""
    options = case(L, "pp=4", layers=4, microbatches=microbatches, global_batch=microbatches)
    for counts, rank in pool.run(4, run_live, options):
        assert max(counts) == min(4 - rank, microbatches)


def run_split(rank: int, options: VerifyOptions) -> dict[str, Any]:
    """What a stage's pieces do: kinds of products in each, and whether something is saved twice."""
    _, _, step = step_of(options)
    assert isinstance(step, PipelineStep)
    step.prepare()
    (made,) = step.traced.values()
    found: dict[str, Any] = {"rank": rank}
    for kind, piece in made.pieces.items():
        nodes = list(piece.program.graph.graph.nodes)
        found[kind] = sum(any(w in str(n.target) for w in ("mm", "linear")) for n in nodes)
        saved = [n for n in nodes if n.op == "placeholder" and not n.name.startswith(("whole", "batch", "buffer"))]
        storages = [n.meta["val"].untyped_storage()._cdata for n in saved]
        found[f"twice in {kind}"] = len(storages) - len(set(storages))
    return found


def test_pieces_split_the_products(pool: Pool) -> None:
    """Of each layer's products F has one, I one for the input and W one for the weight; no view is saved beside its base."""
    for found in pool.run(2, run_split, case(L, "pp=2", layers=2, microbatches=2, schedule="zb-h1")):
        assert found["F"] > 0 and found["W"] >= found["F"]
        assert found["twice in I"] == found["twice in W"] == 0


def test_a_run_saves_resumes_and_samples(tmp_path: Path) -> None:
    """Four steps at once and two and two give the same bits; other meshes, schedules and cuts read the checkpoint."""
    base = f"{QUICK} --mesh 2x2x1 --microbatches 4 --schedule zbv --tied --lr-decay none"
    one = run(TRAIN, f"{base} --steps 4 --run-dir whole --sample 20 --trace-step 3", tmp_path)
    assert (one.code, one.err) == (0, ""), one
    assert "step 4/4  loss" in one.out and "-1.0" not in one.out
    assert re.search(r"pipeline: F [\d.]+, I [\d.]+, W [\d.]+, send [\d.]+ ms.*bubble [\d.]+%, simulated", one.out)
    events = json.loads((tmp_path / "whole" / "trace-step-3.json").read_text())["traceEvents"]
    stages = {
        pid: {e["name"] for e in events if e["pid"] == pid and e.get("cat") == "user_annotation"} for pid in range(4)
    }
    assert {f"{stage}F{k}" for stage in (0, 3) for k in range(4)} <= stages[0]  # a V: first and last stage
    assert {f"{stage}W{k}" for stage in (1, 2) for k in range(4)} <= stages[2]
    assert not list((tmp_path / "whole").glob("trace-step-3*/*"))
    assert run(TRAIN, f"{base} --steps 2 --run-dir three", tmp_path).code == 0
    done = run(TRAIN, "--run-dir three --resume --steps 4", tmp_path)
    assert done.code == 0, done
    whole, parts = (checkpoint.read_whole(tmp_path / name / "checkpoints" / "step-4") for name in ("whole", "three"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for mesh in ("2", "pp=2,tp=2 --schedule zb-h1 --stage-layers 1,3"):
        again = run(TRAIN, f"--run-dir three --resume --steps 5 --mesh {mesh}", tmp_path)
        assert again.code == 0, again
        (tmp_path / "three" / "checkpoints" / "step-5").rename(tmp_path / f"read-{len(list(tmp_path.iterdir()))}")
    found = [checkpoint.read_whole(path) for path in tmp_path.glob("read-*")]
    assert len(found) == 2
    for other in found[1:]:
        assert all(torch.allclose(found[0][n], other[n], rtol=1e-4, atol=1e-5) for n in found[0])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--mesh pp=2 --schedule nothing", "--schedule nothing: no such schedule. Use one of gpipe"),
        ("--mesh pp=2 --stage-layers 1,2", "--stage-layers 1,2: 3 layers, the model has 4"),
        ("--mesh pp=2 --stage-layers 1,x", "--stage-layers 1,x: not whole numbers"),
        ("--mesh pp=2 --schedule zbv --stage-layers 2,2", "--stage-layers 2,2: 2 numbers for 4 stages"),
        ("--mesh pp=2 --schedule 1f1b --chunks 2", "--chunks 2: schedule 1f1b: 2 stages a rank. It has 1"),
        ("--mesh pp=2 --schedule mine.csv", "--schedule mine.csv: no such file"),
        ("--mesh pp=2 --schedule bad.csv --microbatches 2", "bad.csv"),
        ("--mesh pp=2 --schedule bad.csv --chunks 2", "--chunks 2: the table of --schedule bad.csv says it"),
        ("--mesh pp=2 --microbatches 300000 --global-batch 300000", "1,800,000 actions of a schedule. At most 300,000"),
    ],
)
def test_bad_options(tmp_path: Path, options: str, part: str) -> None:
    """A mistake is one message, exit code 2, before a rank starts."""
    (tmp_path / "bad.csv").write_text("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n")
    done = run(TRAIN, f"{QUICK} {options}", tmp_path)
    assert done.code == 2, done
    assert part in done.err and "Traceback" not in done.err, done


def test_resume_takes_what_belongs_together(tmp_path: Path) -> None:
    """A table is found from another folder; chunks and layers of the first run's stages do not bind another schedule; a
    step to trace lies ahead."""
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "mine.csv").write_text(make("interleaved", 2, 2, 3).to_csv())
    first = f"{QUICK} --mesh pp=2 --schedule mine.csv --stage-layers 1,1,1,1,0,0 --steps 2 --run-dir ../one"
    assert run(TRAIN, first, tmp_path / "from").code == 0
    done = run(TRAIN, "--run-dir one --resume --steps 3 --trace-step 3", tmp_path)
    assert (done.code, done.err) == (0, ""), done
    assert (tmp_path / "one" / "trace-step-3.json").exists()
    done = run(TRAIN, "--run-dir one --resume --steps 4 --trace-step 3", tmp_path)
    assert done.code == 2 and "--trace-step 3: the run goes on at step 4" in done.err
    done = run(TRAIN, "--run-dir one --resume --steps 4 --schedule zbv", tmp_path)
    assert (done.code, done.err) == (0, ""), done
    assert "zbv, 4 stages" in done.out


def test_own_table_runs(pool: Pool, tmp_path: Path) -> None:
    """A schedule from a file runs, and is exact."""
    path = tmp_path / "own.csv"
    path.write_text(make("zb-h1", 2, 3).to_csv())
    check_equal(pool, case(L, "pp=2", layers=3, microbatches=3, schedule=os.path.relpath(path)))


def test_the_command_names_the_pipeline() -> None:
    """The line that reproduces a case holds schedule, chunks and cut."""
    options = case(L, "pp=2", layers=4, microbatches=3, schedule="interleaved", chunks=2, stage_layers="1,1,1,1")
    assert "--schedule interleaved --chunks 2 --stage-layers 1,1,1,1" in command_of(options)
    assert setup_of(options).layers == (1, 1, 1, 1)
