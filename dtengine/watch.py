"""What rank 0 shows and writes of a run."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from dtengine import monitor, ranks, screens
from dtengine.data import BatchShape, bigram_loss
from dtengine.job import Job
from dtengine.layout import Layout, local_bounds
from dtengine.mesh import parse_mesh
from dtengine.model import buffers, parameters
from dtengine.options import PipelineOptions, ProgramOptions, TrainOptions
from dtengine.parameters import COMPUTE_DTYPES, has_master
from dtengine.pipeline.actions import Schedule
from dtengine.pipeline.simulate import Simulation
from dtengine.pipeline.timeline import report
from dtengine.step import Step


class Watch:
    """What rank 0 shows and writes of a run: screen, progress, TensorBoard, status."""

    def __init__(
        self, job: Job, environment: ranks.RankEnvironment, backend: str, device: torch.device, start: int
    ) -> None:
        options, setup = job.options, job.setup
        self.job, self.device, self.console = job, device, Console(highlight=False)
        self.tokens = job.tokens
        self.last, self.heldout = (math.nan, math.nan), math.nan
        self.status = monitor.Status(
            job.folder / "status.json",
            device,
            rank=environment.rank,
            world_size=environment.world_size,
            backend=backend,
            run=job.folder.name,
            mesh=options.mesh.mesh,
            plan=setup.plan.name,
            steps=options.optimizer.steps,
            status="starting",
            step=start,
        )
        self.status.update()
        self.events = monitor.Events(job.folder / "tensorboard", start if start else None)
        facts = start_facts(job, environment, backend, device, start)
        axes = {a for p in parameters(setup.model.specs(setup.model_config)).values() for a in p.names}
        axes |= {"batch", "seq", "res_seq"}
        notes = [f"{path.name} does not verify and was moved away" for path in job.damaged]
        if options.run.resume and job.resumed is None:
            notes.append(f"no checkpoint in {job.folder}: it starts at step 1")
        notes += [*setup.warnings, *([f"changed on resume: {job.changed}"] if job.changed else [])]
        screens.start_screen(self.console, setup.plan, facts, warnings=notes, axes=axes)
        self.events.text("plan", screens.plan_text(setup.plan, facts, axes=axes))
        self.progress = monitor.Progress(self.console, options.optimizer.steps, start + 1)

    def traced(self, seconds: float, step: Step, memory: Sequence[Mapping[str, int]]) -> None:
        """Say what the programs cost, what a step communicates and what each rank will hold; the run begins."""
        self.events.scalars(self.status.fields["step"], trace_seconds=seconds)
        counts = {axes: ", ".join(f"{n} {name}" for name, n in ops.items()) for axes, ops in step.collectives().items()}
        how = "program from the cache in" if "step" in step.recalled else "traced in"
        self.console.print(
            f"{how} {seconds:.1f} s; collectives a step: "
            + ("; ".join(f"{axes}: {text}" for axes, text in counts.items()) or "none"),
            style="dim",
        )
        if memory:
            stages = self.job.setup.plan.sizes.get("pp", 1)
            screens.memory_table(self.console, memory, stages)
            self.events.text("memory", screens.memory_text(memory, stages))
        self.progress.__enter__()
        self.status.update(status="running")

    def stepped(
        self,
        step: int,
        loss: float,
        norm: float,
        lr: float,
        seconds: float,
        waited: float,
        scale: float | None = None,
    ) -> None:
        """Show and write one step.

        Args:
            step: numbered from 1.
            loss: nats per token.
            norm: of the gradient, before clipping.
            lr: learning rate.
            seconds: of the step.
            waited: seconds of waiting for data in it.
            scale: loss scale that it used, in fp16; with a loss or norm that is not finite the step was skipped.
        """
        rate = self.tokens / seconds
        self.last = (loss, norm)
        self.progress.update(step, loss, rate)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.progress.note(f"step {step}: overflow at loss scale {scale:.0f}; skipped, the scale is halved")
        if step % self.job.options.run.log_every == 0:
            used, _, host = monitor.memory_gb(self.device)
            self.events.scalars(
                step,
                loss=loss,
                gradient_norm=norm if math.isfinite(norm) else None,
                learning_rate=lr,
                tokens_per_second=rate,
                step_seconds=seconds,
                data_wait_seconds=waited,
                memory_gb=host if used is None else used,
                loss_scale=scale,
            )
        sequences = self.job.setup.global_batch / seconds
        self.status.update(
            status="running",
            step=step,
            loss=loss,
            tokens_per_sec=rate,
            throughput_samples_per_sec=sequences,
            loss_scale=scale,
        )

    def measured(self, step: int, measured: int, estimated: int) -> None:
        """Show and write the measured peak of a step beside the estimate, both in bytes."""
        text = (
            f"memory of step {step}: measured {screens.bytes_text(measured)}, estimated "
            f"{screens.bytes_text(estimated)}, {measured / estimated - 1:+.1%}"
        )
        self.progress.note(text)
        self.events.text("memory measured", text)

    def timed(self, step: int, schedule: Schedule, runs: Sequence[Simulation]) -> None:
        """Show and write what the actions of a pipeline took in some steps, and its bubble beside the simulator's."""
        found = report(schedule, runs, self.job.setup.layers)
        self.progress.note(found.text)
        self.events.text("pipeline", found.markdown)
        self.events.scalars(step, bubble=found.bubble, bubble_simulated=found.simulated)

    def evaluated(self, step: int, loss: float) -> None:
        """Show and write a held-out loss."""
        self.heldout = loss
        self.progress.heldout(step, loss)
        self.events.scalars(step, heldout_loss=loss)
        self.status.update(heldout_loss=loss)

    def saved(self) -> None:
        """Note that a checkpoint is published."""
        self.events.flush()
        self.status.update(status="running", checkpoint_saved_at=monitor.utc_now())

    def sampling(self) -> None:
        """Say that the steps are done and text is being sampled."""
        if self.job.options.run.sample:
            self.progress.note(f"sampling {self.job.options.run.sample} tokens")

    def failed(self, error: Exception) -> None:
        """Close everything; the launcher prints the error."""
        self.progress.__exit__(None, None, None)
        self.events.close()
        self.status.update(status="failed", error=f"{type(error).__name__}: {error}")

    def finished(self, text: str | None) -> None:
        """Close everything and print the end screen, with sampled text where there is some."""
        self.progress.__exit__(None, None, None)
        self.events.close()
        folder = shlex.quote(str(self.job.folder))
        steps = self.job.options.optimizer.steps
        results = [("training loss", f"{self.last[0]:.4f}"), ("held-out loss", f"{self.heldout:.4f} nats per token")]
        corpus, vocab = self.job.corpus, self.job.setup.model_config.vocab
        bigram = bigram_loss(corpus.train, corpus.heldout, vocab, self.job.heldout_limit)
        if bigram is not None:
            better = bigram - self.heldout
            word = "better" if better >= 0 else "worse"
            results.append(("bigram model", f"{bigram:.4f} on the same sequences; ours is {abs(better):.4f} {word}"))
        options = self.job.options
        traced = self.job.folder / f"trace-step-{options.run.trace_step}.json"
        if options.run.trace_step is not None and traced.exists():
            results.append(("trace", f"{traced}, for ui.perfetto.dev"))
        commands = [
            ("look", f"tensorboard --logdir {folder}/tensorboard"),
            ("train on", f"python -m dtengine.train --run-dir {folder} --resume --steps {2 * steps}"),
            ("prove", f"python -m dtengine.verify {prove_options(options)}"),
        ]  # fmt: skip
        screens.end_screen(self.console, results, text, commands)
        self.status.update(status="finished")


def prove_options(options: TrainOptions) -> str:
    """Return the options of a run that shape its step, for ``dtengine.verify``."""
    words = ["--mesh", options.mesh.mesh, "--plan", options.mesh.plan, *([] if options.mesh.sp else ["--no-sp"])]
    for name, value in [*asdict(options.model).items(), *asdict(options.batch).items()]:
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    staged = parse_mesh(options.mesh.mesh).get("pp", 1) > 1
    beside: list[tuple[Any, Any, tuple[str, ...]]] = [
        *([(options.pipeline, PipelineOptions(), ("schedule", "chunks", "stage_layers"))] if staged else []),
        (
            options.program,
            ProgramOptions(),
            ("recompute", "activation_budget", "save", "prefetch", "bucket_mb", "offload"),
        ),
    ]
    for chosen, usual, names in beside:
        for name in names:
            if (value := getattr(chosen, name)) != getattr(usual, name):
                words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def start_facts(
    job: Job, environment: ranks.RankEnvironment, backend: str, device: torch.device, start: int
) -> list[tuple[str, str]]:
    """Return the lines of the start screen beside the layouts."""
    setup, plan = job.setup, job.setup.plan
    specs = setup.model.specs(setup.model_config)
    params = parameters(specs)
    whole = sum(math.prod(p.shape) for p in params.values())
    sizes = tuple(plan.sizes.values())

    own = setup.parameters_of(0)

    def held(layout: Layout) -> int:
        placed = [(p.shape, layout.placements(p.names, plan.sizes)) for p in own.values()]
        bounds = [local_bounds(shape, placements, sizes, (0,) * len(sizes)) for shape, placements in placed]
        return sum(math.prod(stop - start for start, stop in one) for one in bounds)

    def state(whole: bool) -> int:
        """Numbers of the optimizer's state that a rank holds, or one device would."""
        total = 0
        for param in (params if whole else own).values():
            placements = plan.optimizer.placements(param.names, plan.sizes)
            for slot in optimizer.slots(param).values():
                bounds = local_bounds(slot.shape, slot.placements(placements), sizes, (0,) * len(sizes))
                total += math.prod(slot.shape) if whole else math.prod(stop - start for start, stop in bounds)
        return total

    width = 8 if setup.step.precision == "fp64" else 4
    optimizer = setup.optimizer(job.options.optimizer)
    master = has_master(plan, setup.step.precision)
    stored = COMPUTE_DTYPES[setup.step.precision].itemsize if master else width
    total = stored * held(plan.params) + width * (held(plan.grads) + state(whole=False) + master * held(plan.optimizer))
    shape: BatchShape = setup.batch_shape
    rate = f"{job.rate.peak:.3g}, {job.rate.warmup} steps warm-up, {job.rate.decay} decay"
    facts = [
        ("model", f"{job.options.model.size or job.options.model.model}, {setup.model_config.layers} layers, "
                  f"embed {setup.model_config.embed}, seq {setup.model_config.seq}, vocab {setup.model_config.vocab}"),
        ("parameters", f"{screens.count_text(whole)} whole, {screens.count_text(held(plan.params))} a rank; with "
                       f"gradients and optimizer state {screens.bytes_text(total)} a rank"),
        ("global batch", screens.batch_text(plan, shape.microbatches, shape.microbatch)),
        ("tokens", f"{screens.count_text(job.tokens)} a step; {job.corpus.source}"),
        ("optimizer", f"{job.options.optimizer.optimizer}, {job.options.optimizer.steps} steps"),
        ("learning rate", rate + (f" ({job.rate_note})" if job.rate_note else "")),
        ("ranks", f"{environment.world_size} by {environment.launcher}, {backend} on {device.type}, "
                  f"{torch.get_num_threads()} thread(s) each, {setup.step.precision}"),
        ("folder", str(job.folder)),
    ]  # fmt: skip
    if setup.schedule is not None:
        layers = ", ".join(map(str, setup.layers))
        facts.insert(1, ("pipeline", f"{setup.schedule.name}, {len(setup.layers)} stages of {layers} layers"))
    if held_buffers := buffers(specs):
        numbers = screens.count_text(sum(math.prod(b.shape) for b in held_buffers.values()))
        facts.append(("buffers", f"{numbers} numbers beside the parameters"))
    if start:
        facts.append(("resumed", f"at step {start}"))
    if plan.num_ranks > 1:
        one = whole * (stored + width * (1 + master)) + width * state(whole=True)
        facts.append(("one device", f"would hold {screens.bytes_text(one)} of state without any of this communication"))
    return facts
