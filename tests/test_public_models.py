"""The tables of sizes of `scripts/public_models`, whose packages are not installed here."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "scripts/public_models"
SIZES = runpy.run_path(str(FOLDER / "sizes.py"))
TABLES = {name: table for name, table in SIZES.items() if isinstance(table, dict) and "tiny" in table}
STACKS = {name: table for name, table in TABLES.items() if isinstance(table["real"], SIZES["Stack"])}


@pytest.mark.parametrize("name", TABLES)
def test_a_model_has_the_three_sizes(name: str) -> None:
    assert f"sizes.{name}," in (FOLDER / "sources.py").read_text(encoding="utf-8")
    assert all(SIZES["resolve"](TABLES[name], size, 8) for size in ("tiny", "page", "real"))


@pytest.mark.parametrize("name", STACKS)
def test_heads_divide_the_width(name: str) -> None:
    for sizes in STACKS[name].values():
        assert not sizes.heads or (sizes.hidden if name == "S5" else sizes.width) % sizes.heads == 0


@pytest.mark.parametrize("name", ["LLAMA", "GEMMA", "QWEN3"])
def test_key_heads_divide_heads(name: str) -> None:
    assert all(sizes.heads % sizes.key_heads == 0 for sizes in STACKS[name].values())


def test_layers_are_those_published_or_fewer() -> None:
    gpt2 = TABLES["GPT2"]
    assert [SIZES["resolve"](gpt2, "real", layers).layers for layers in (1, 8, 100)] == [1, 8, 24]
    assert SIZES["resolve"](gpt2, "tiny", 8) == gpt2["tiny"]
    assert SIZES["resolve"](TABLES["UNET"], "real", 1) == TABLES["UNET"]["real"]


def test_a_size_or_a_number_of_layers_that_is_none_says_what_was_expected() -> None:
    with pytest.raises(ValueError, match="size is 'small', expected one of tiny, page, real"):
        SIZES["resolve"](TABLES["GPT2"], "small", 8)
    with pytest.raises(ValueError, match="layers is 0, expected at least 1"):
        SIZES["resolve"](TABLES["GPT2"], "real", 0)
