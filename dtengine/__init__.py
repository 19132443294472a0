"""Train models on more than one device, from one declared plan.

    python -m dtengine.train --mesh 2x4        train
    python -m dtengine.verify --mesh 2x4       prove that a plan computes what one device computes

The names below are what these commands are made of.
"""

from dtengine import checkpoint
from dtengine.corpus import Corpus, Sequences, load_corpus
from dtengine.data import IGNORE, Batch, BatchShape, Loader, heldout_batches, train_batches
from dtengine.launch import RankFailed, start_ranks
from dtengine.layout import Layout, Plan, Rule, make_plan
from dtengine.mesh import Mesh, build_mesh, parse_mesh
from dtengine.model import Buffer, Model, ModelConfig, Param, Tied, configure, load_model
from dtengine.ops import Ops
from dtengine.optim import OPTIMIZERS, Optimizer, adafactor, adamw, lion, muon, sgd
from dtengine.program import Program
from dtengine.ranks import launcher_environment, process_group
from dtengine.rates import LearningRate
from dtengine.shard import gather
from dtengine.step import Metrics, State, Step, StepConfig, init_state, make_step

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
