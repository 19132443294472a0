"""The table of optimizers.

| name | state, numbers a parameter | source |
| --- | --- | --- |
| adamw | 2 | Loshchilov & Hutter 2019 |
| sgd | 0, with momentum 1 | |
| lion | 1 | Chen et al. 2023 |
| adafactor | (m + n) / mn for a matrix, else 1 | Shazeer & Stern 2018 |
| muon | 1 for a hidden matrix, else 2 | Jordan et al. 2024 |
"""

from collections.abc import Callable

from dtengine.adafactor import adafactor
from dtengine.elementwise import adamw, lion, sgd
from dtengine.muon import muon
from dtengine.optimizer import Optimizer

__all__ = ["OPTIMIZERS", "Optimizer", "adafactor", "adamw", "lion", "muon", "sgd"]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}
