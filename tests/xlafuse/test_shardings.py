"""Where a block's and a model's arrays lie on a mesh, and meshes that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec as P

from xlafuse.errors import UnknownNameError
from xlafuse.models import ShardingError, block_function, get_preset, layout_of
from xlafuse.models.decoder import Decoder, get_decoder
from xlafuse.models.shardings import parse_mesh

BOTH = {"data": 2, "tensor": 2}


def specs(parallel: str, sizes: dict[str, int]) -> dict[str, P]:
    """The specs of a model's arrays, by the end of their names."""
    decoder, layout = Decoder(get_decoder("tiny")), layout_of(sizes, parallel)
    shardings = layout.of_weights(jax.eval_shape(decoder.params, jax.random.key(0)))
    named = {jax.tree_util.keystr(path): leaf.spec for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)}
    found = {re.findall(r"\w+", name)[2 if "layers" in name else 0]: spec for name, spec in named.items()}
    return found | {"rows": layout.rows.spec}


@pytest.mark.parametrize(
    ("parallel", "sizes", "expected"),
    [
        ("dp", {"data": 4}, {"query": P(None, None), "output": P(None, None), "rows": P(("data",), None)}),
        ("fsdp", {"data": 4}, {"query": P("data", None), "output": P("data", None), "attention_norm": P(None)}),
        ("fsdp", BOTH, {"query": P("data", "tensor"), "down": P("tensor", "data"), "head": P("data", "tensor")}),
        ("tp", BOTH, {"gate": P(None, "tensor"), "down": P("tensor", None), "rows": P(("data",), None)}),
        ("sp", {"tensor": 4}, {"up": P(None, "tensor"), "rows": P((), "tensor")}),
        ("fsdp", {"replica": 2, "data": 2}, {"rows": P(("replica", "data"), None), "embedding": P("data", None)}),
    ],
)
def test_each_kind_of_parallel_cuts_its_dimensions(parallel, sizes, expected):
    found = specs(parallel, sizes)
    assert {name: tuple(found[name]) for name in expected} == {name: tuple(spec) for name, spec in expected.items()}


def test_a_blocks_arguments_have_their_shardings():
    _, (params, x, positions) = block_function("tiny", (4, 64), layout=layout_of(BOTH, "sp"))
    assert x.sharding.spec == P(("data",), "tensor")
    assert positions.sharding.spec == P(("data",))
    assert params["query"]["kernel"].sharding.spec == P(None, "tensor")


def test_expert_parallel_gives_each_device_whole_experts():
    block = replace(get_preset("tiny"), num_experts=4, experts_per_token=2)
    _, (params, *_) = block_function(block, (4, 64), layout=layout_of(BOTH, "ep"))
    specs = {name: leaf.sharding.spec for name, leaf in params["experts"].items()}
    whole = P("tensor", None, None)
    assert specs == {"router": P(None, None), "gate": whole, "up": whole, "down": whole}
    assert params["query"]["kernel"].sharding.spec == P(None, "tensor")
    with pytest.raises(ShardingError, match=r"experts.*tensor"):
        block_function(replace(block, num_experts=3), (4, 64), layout=layout_of(BOTH, "ep"))


@pytest.mark.parametrize("text", ["data", "data=0", "data=2,data=2", "data=two", ""])
def test_what_is_no_mesh(text):
    with pytest.raises(ShardingError, match="expected a mesh as data=2,tensor=4"):
        parse_mesh(text)


def test_unknown_names_have_the_nearest():
    with pytest.raises(UnknownNameError, match="tensor"):
        parse_mesh("tensors=2")
    with pytest.raises(UnknownNameError, match="fsdp"):
        layout_of(BOTH, "fdsp")


@pytest.mark.parametrize(
    ("parallel", "sizes", "message"),
    [
        ("tp", {"data": 4}, "tp cuts over the mesh axis 'tensor'"),
        ("fsdp", {"data": 1, "tensor": 4}, "fsdp cuts over the mesh axis 'data'"),
        ("dp", BOTH, "dp cuts nothing over the mesh axis 'tensor'"),
    ],
)
def test_a_mesh_without_the_axis_that_is_cut(parallel, sizes, message):
    with pytest.raises(ShardingError, match=message):
        layout_of(sizes, parallel)


def test_a_mesh_of_another_size_than_the_devices():
    with pytest.raises(ShardingError, match="is of 64 devices, and there are"):
        layout_of({"data": 64}, "dp", jax.devices("cpu"))


def test_what_an_axis_does_not_divide_is_named():
    with pytest.raises(ShardingError, match=r"x: the mesh axis data=4 does not divide dimension 0 .*\(6, 64, 256\)"):
        block_function("tiny", (6, 64), layout=layout_of({"data": 4}, "dp"))
    with pytest.raises(ShardingError, match=r"params\['down'\]\['kernel'\]: the mesh axis tensor=3 does not divide"):
        block_function("tiny", (6, 64), layout=layout_of({"tensor": 3}, "tp"))
