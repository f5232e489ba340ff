"""Small programs with the structure of well-known models, for tests of advice, reports and `xlafuse.fuse`.

Each module has a function `step` and a function `arguments`, which returns the shapes of its arguments as a tuple:
`capture(*load("vit"))`, or `xlafuse report --fn tests/programs/vit.py:step --args tests/programs/vit.py:arguments`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

NAMES = (
    "lm1b",
    "gemma",
    "resnet",
    "graphnet",
    "haiku_lm",
    "mamba",
    "unet",
    "gru",
    "cartpole",
    "vit",
    "bert",
    "experts",
    "vae",
    "dlrm",
    "kmeans",
    "mixer",
    "pointnet",
)
"""The programs. Nobody tuned advice to those from vit to mixer before they were here."""


def load(name: str) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    """A program's function and the shapes of its arguments."""
    module = import_module(f"programs.{name}")
    return module.step, *module.arguments()
