"""What a step changes, what it finds, and what shapes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor


class State(NamedTuple):
    """All that a step changes.

    Attributes:
        step: number of steps done, which is the position in data and learning rate. In fp16 some may have been skipped;
            AdamW's bias correction counts without them.
        params: {name: DTensor} in the params layout: fp32 (fp64 where computed so), or the compute dtype where there is
            a master.
        slots: {name: {slot: DTensor}} in the optimizer layout, or whole where the optimizer says so.
        master: {name: DTensor} in the optimizer layout, the fp32 parameters of which ``params`` are a cast; empty where
            params are fp32 themselves (see ``parameters.has_master``).
        scale: in fp16 the loss scale, float32 [3] as ``loss_scale.LossScale``, whole on every rank; else None.
        buffers: {name: DTensor} in the compute layout; what the model carries from pass to pass, such as batch-norm
            statistics.
    """

    step: int
    params: dict[str, DTensor]
    slots: dict[str, dict[str, DTensor]]
    master: Mapping[str, DTensor]
    scale: Tensor | None
    buffers: Mapping[str, DTensor]

    @property
    def weights(self) -> Mapping[str, DTensor]:
        """The parameters in full precision: the master where there is one."""
        return self.master or self.params


class Metrics(NamedTuple):
    """What a step found, equal on all ranks; scalar tensors, so that reading them is the caller's choice.

    Attributes:
        loss: nats per counted token of the global batch.
        norm: gradient norm before clipping.
        finite: 0.0 where loss or norm was not finite; then nothing was updated but the loss scale.
        bad_data: [coordinates] 1.0 for each data-parallel coordinate whose own loss was not finite.
        lr: learning rate of the update; the one number that is not a tensor.
        scale: in fp16 the loss scale that the step used; else None.
    """

    loss: Tensor
    norm: Tensor
    finite: Tensor
    bad_data: Tensor
    lr: float
    scale: Tensor | None


@dataclass(frozen=True)
class StepConfig:
    """What shapes a step beside model, plan and optimizer.

    Attributes:
        microbatch: sequences that one data-parallel coordinate takes in one pass.
        seq: tokens in a sequence.
        microbatches: passes that make a step.
        precision: a key of COMPUTE_DTYPES; master parameters, gradients and optimizer state are fp32 (fp64 with fp64).
        reduce_dtype: gradients are summed over ranks in fp32 ("fp32"; fp64 with fp64) or in the compute dtype ("compute").
        loss_scale: first loss scale of fp16, a power of two.
        loss_scale_window: good steps in a row after which it is doubled.
        clip: largest global gradient norm; 0 clips nothing.
        norm_order: order of that norm: 1, 2 or inf.
        dropout: probability in [0, 1).
        label_smoothing: share of each label that is spread evenly over the vocabulary, in training.
        z_loss: coefficient on log(Z)^2, in training.
        seed: of dropout and initial parameters.
        eager: run the functions untraced.
        recompute: what blocks compute again in their backward: none, full, selective or every-N.
        activation_budget: share of the activations that blocks keep; None for what ``recompute`` says.
        save: what other parts keep for their backward: all, or min-cut.
        prefetch: groups of blocks whose parameters are gathered ahead of the one that computes.
        bucket_mb: parameters are gathered, and gradients reduced, by whole parts together until they have this size, in
            units of 2^20 bytes.
        offload: what lies in host memory: none, optimizer (its state), or parameters (also their shards, between uses).
        disable_pass: names of passes that do not run.
        compile: compile forward and backward of each kind of part by Inductor.
        reshard: drop gathered parameters behind their forward and gather them again for their backward (fsdp).
        cuda_graphs: replay the step as a CUDA graph.
    """

    microbatch: int
    seq: int
    microbatches: int = 1
    precision: str = "fp32"
    reduce_dtype: str = "fp32"
    loss_scale: float = 2.0**16
    loss_scale_window: int = 2000
    clip: float = 1.0
    norm_order: float = 2.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    seed: int = 0
    eager: bool = False
    recompute: str = "none"
    activation_budget: float | None = None
    save: str = "all"
    prefetch: int = 1
    bucket_mb: float = 25.0
    offload: str = "none"
    disable_pass: tuple[str, ...] = ()
    compile: bool = False
    reshard: bool = True
    cuda_graphs: bool = False
