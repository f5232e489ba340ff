"""The tuned table: read while tracing, never a crash, written whole, and taken before an operation's own rule."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import REGISTRY, tuning
from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops.attention.backward import config as backward_choice
from pallas_kernels.ops.attention.forward import config as attention
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.linear import config as linear
from pallas_kernels.specs import plain
from pallas_kernels.tuning import Choice, TuningWarning

KIND = "NVIDIA H200"
MESH = AbstractMesh(
    (1,), ("_",), axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind=KIND, num_cores=132, platform="gpu"),
)  # fmt: skip
X, W = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 4096), (4096, 4096)))
LAYER, ARRAYS = Layer(out_dtype=X.dtype), LayerArrays(X, W)
PLAIN = linear.tuned_key(LAYER, ARRAYS)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's table of the H200, not there yet."""
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    yield tuning.cache_folder() / tuning.file_name(KIND)
    tuning.forget()


def entry(implementation="mosaic", variant=None):
    return Choice(implementation=implementation, variant=variant, microseconds={"xla": 341.5, implementation: 340.0})


def test_names():
    assert tuning.file_name(KIND) == "h200.json"
    assert tuning.file_name("NVIDIA H100 80GB HBM3") == "h100_80gb_hbm3.json"
    assert [tuning.near(size) for size in (0, 1, 3, 500, 724, 725)] == [0, 1, 4, 512, 512, 1024]
    # Kernels of few rows take up to 16, or up to 64.
    assert [tuning.near(size) for size in (16, 17, 64, 65, 90, 181, 182)] == [16, 32, 64, 128, 128, 128, 256]
    assert tuning.key_of("linear", "forward", PLAIN) == (
        "linear forward rows=8192 features=4096 outputs=4096 dtype=bfloat16 behind=nothing"
    )


def test_an_entry_goes_before_the_operations_rule(own):
    with jax.sharding.use_abstract_mesh(MESH):
        assert linear.preferred(LAYER, ARRAYS) == ()  # plain products are XLA's
        untuned = linear.tuned_config(PLAIN, 8192)
        tuning.add(own, KIND, {tuning.key_of("linear", "forward", PLAIN): entry(variant="128x128")})
        assert linear.preferred(LAYER, ARRAYS) == ("mosaic",)
        assert linear.tuned_config(PLAIN, 8192) == linear.candidates(8192)["128x128"] != untuned
        tuning.add(own, KIND, {tuning.key_of("linear", "forward", PLAIN): entry(variant="a name of last year")})
        assert linear.tuned_config(PLAIN, 8192) == untuned
        with_residual = ARRAYS._replace(residual=jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16))
        assert linear.preferred(LAYER, with_residual) == ("mosaic",)
        other = linear.tuned_key(LAYER, with_residual)
        tuning.add(own, KIND, {tuning.key_of("linear", "forward", other): entry("xla")})
        assert linear.preferred(LAYER, with_residual) == ("xla",)
    # Another device has its own table.
    assert linear.preferred(LAYER, ARRAYS) == ()


def test_attention_looks_up_both_passes(own):
    op = REGISTRY["attention"]
    spec = next(spec for spec in op.tagged("block") if spec.arguments["query"].shape[0] == 4)
    known = op.tuned_key(plain(spec.structs()))
    assert tuning.key_of(op.name, "backward", known) == (
        "attention backward batch=4 queries=4096 keys=4096 heads=32 key_heads=8 head_size=128 dtype=bfloat16 "
        "before=all after=0 with=nothing"
    )
    masking = Masking(queries=4096, keys=4096, right=0)
    sizes = {"batch": 4, "heads": 32, "key_heads": 8, "head_size": 128, "value_size": 128}
    problem = Problem(**sizes, dtype=jnp.dtype("bfloat16"), masking=masking, scale=1.0)
    assert attention.known(problem) == known
    forward, backward = "no ping-pong", "two kernels"
    with jax.sharding.use_abstract_mesh(MESH):
        assert attention.tuned_forward(problem) == attention.default_forward(problem)
        assert backward_choice.tuned_backward(problem) == backward_choice.default_backward(problem)
        for phase, variant in (("forward", forward), ("backward", backward)):
            tuning.add(own, KIND, {tuning.key_of(op.name, phase, known): entry(variant=variant)})
        assert attention.tuned_forward(problem) == attention.forward_candidates(problem)[forward]
        assert not backward_choice.tuned_backward(problem).keys.adds_dquery
        assert backward_choice.default_backward(problem).keys.adds_dquery


def test_attention_is_known_by_all_its_keys_also_where_few_are_seen(own):
    masking = Masking(queries=848, keys=3656, right=0)
    sizes = {"batch": 8, "heads": 12, "key_heads": 12, "head_size": 64, "value_size": 64}
    problem = Problem(**sizes, dtype=jnp.dtype("bfloat16"), masking=masking, scale=1.0)
    key = tuning.key_of("attention", "backward", attention.known(problem))
    with jax.sharding.use_abstract_mesh(MESH):
        untuned = backward_choice.tuned_backward(problem)
        tuning.add(own, KIND, {key: entry(variant="two kernels")})
        tuned = backward_choice.tuned_backward(problem)
    assert untuned == backward_choice.default_backward(replace(problem, masking=replace(masking, keys=896)))
    assert (untuned.keys.adds_dquery, tuned.keys.adds_dquery) == (True, False)


def test_writing_keeps_the_other_entries_and_leaves_nothing_behind(own, monkeypatch):
    tuning.add(own, KIND, {"b": entry()})
    tuning.add(own, KIND, {"a": entry("xla")})
    assert tuning.read(own, KIND) == {"a": entry("xla"), "b": entry()}
    before = own.read_text()
    with pytest.raises(TypeError):
        tuning.add(own, KIND, {"c": Choice(implementation="xla", variant=None, microseconds={"xla": object()})})
    assert own.read_text() == before
    assert [path.name for path in own.parent.iterdir()] == [own.name]


@pytest.mark.usefixtures("own")
def test_a_cache_out_of_reach_is_a_warning(tmp_path, monkeypatch):
    # As a home of root's is for others: asking whether the file is there raises.
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / ("a name that no file can have" * 20)))
    with jax.sharding.use_abstract_mesh(MESH), pytest.warns(TuningWarning, match="OSError.*XLAFUSE_CACHE"):
        assert linear.preferred(LAYER, ARRAYS) == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        (json.dumps({"schema_version": 2, "device_kind": KIND, "entries": {}}), "schema version 2, expected 1"),
        (json.dumps({"schema_version": 1, "device_kind": "NVIDIA B200", "entries": {}}), "of 'NVIDIA B200'"),
        (json.dumps({"schema_version": 1, "device_kind": KIND, "entries": {"a": {"implementation": 3}}}), "TypeError"),
        (json.dumps({"schema_version": 1, "device_kind": KIND, "entries": [1]}), "AttributeError"),
    ],
)
def test_a_broken_table_is_a_warning_and_the_rule_holds(own, text, told):
    own.parent.mkdir(parents=True)
    own.write_text(text)
    with jax.sharding.use_abstract_mesh(MESH):
        with pytest.warns(TuningWarning, match=told):
            assert linear.preferred(LAYER, ARRAYS) == ()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            assert linear.preferred(LAYER, ARRAYS) == ()
