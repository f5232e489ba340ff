"""Public models' tables of sizes, and their page; the packages of the models are not installed here."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from xlafuse.bench.public.sizes import GPT2, UNET, Stack, resolve
from xlafuse.bench.public.sources import MODELS
from xlafuse.bench.results import load

ROOT = Path(__file__).parents[1]
STACKS = {model.name: model.sizes for model in MODELS if isinstance(model.sizes["real"], Stack)}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_has_the_three_sizes(model: Any) -> None:
    assert all(resolve(model.sizes, size, 8) for size in ("tiny", "page", "real"))
    sizes = model.sizes["real"]
    batch = sizes.graphs if hasattr(sizes, "graphs") else sizes.batch
    assert model.units("real") == batch * (sizes.length if model.unit == "tokens" else 1)


@pytest.mark.parametrize("name", STACKS)
def test_heads_divide_the_width(name: str) -> None:
    for sizes in STACKS[name].values():
        assert not sizes.heads or (sizes.hidden if name == "s5" else sizes.width) % sizes.heads == 0


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen3"])
def test_key_heads_divide_heads(name: str) -> None:
    assert all(sizes.heads % sizes.key_heads == 0 for sizes in STACKS[name].values())


def test_layers_are_those_published_or_fewer() -> None:
    assert [resolve(GPT2, "real", layers).layers for layers in (1, 8, 100, None)] == [1, 8, 24, 24]
    assert resolve(GPT2, "tiny", 8) == GPT2["tiny"]
    assert resolve(UNET, "real", 1) == UNET["real"]


def test_a_size_or_a_number_of_layers_that_is_none_says_what_was_expected() -> None:
    with pytest.raises(ValueError, match="size is 'small', expected one of tiny, page, real"):
        resolve(GPT2, "small", 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="layers is 0, expected at least 1"):
        resolve(GPT2, "real", 0)


def test_the_page_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts/public_models/__main__.py"))
    text = script["PAGE"].read_text(encoding="utf-8")
    counted = json.loads(script["RESULTS"].read_text(encoding="utf-8"))
    assert script["page"](text, counted, load(script["MEASURED"])) == text, "run `scripts/public_models --write-page`"
