"""Train models on more than one device, from one declared plan.

    python -m dtengine.train --mesh 2x4        train
    python -m dtengine.verify --mesh 2x4       prove that a plan computes what one device computes

The names below are what these commands are made of.
"""

import gc

collecting = gc.isenabled()
gc.disable()  # imports make objects that stay: looking for garbage among them took 0.3 of 1.7 s of CPU time

from dtengine import checkpoint  # noqa: E402
from dtengine.corpus import Corpus, Sequences, load_corpus  # noqa: E402
from dtengine.data import IGNORE, Batch, BatchShape, Loader, heldout_batches, train_batches  # noqa: E402
from dtengine.launch import RankFailed, start_ranks  # noqa: E402
from dtengine.layout import Layout, Plan, Rule, make_plan  # noqa: E402
from dtengine.mesh import Mesh, build_mesh, parse_mesh  # noqa: E402
from dtengine.model import Buffer, Model, ModelConfig, Param, Tied, configure, load_model  # noqa: E402
from dtengine.ops import Ops  # noqa: E402
from dtengine.optim import OPTIMIZERS, Optimizer, adafactor, adamw, lion, muon, sgd  # noqa: E402
from dtengine.program import Program  # noqa: E402
from dtengine.ranks import launcher_environment, process_group  # noqa: E402
from dtengine.rates import LearningRate  # noqa: E402
from dtengine.shard import gather  # noqa: E402
from dtengine.state import Metrics, State, StepConfig  # noqa: E402
from dtengine.step import Step, init_state, make_step  # noqa: E402

if collecting:
    gc.enable()
__version__ = "0.1.0"

__all__ = [
    # a mesh and a plan
    "Layout", "Mesh", "Plan", "Rule", "build_mesh", "make_plan", "parse_mesh",
    # a model
    "Buffer", "Model", "ModelConfig", "Ops", "Param", "Tied", "configure", "load_model",
    # a step
    "LearningRate", "Metrics", "Program", "State", "Step", "StepConfig", "gather", "init_state", "make_step",
    # optimizers
    "OPTIMIZERS", "Optimizer", "adafactor", "adamw", "lion", "muon", "sgd",
    # data
    "IGNORE", "Batch", "BatchShape", "Corpus", "Loader", "Sequences", "heldout_batches", "load_corpus", "train_batches",
    # ranks and state
    "RankFailed", "checkpoint", "launcher_environment", "process_group", "start_ranks",
]  # fmt: skip
