"""The block computes what Llama 3 and GPT-2 compute, and says in its scopes what it is doing."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from hlo_analysis.capture.meshes import mesh_of_one
from hlo_analysis.targets import load_target
from pallas_kernels import recorded_choices
from xlafuse.errors import InapplicablePlanError, UnknownNameError
from xlafuse.models import PRESETS, BlockConfig, FusionPlan, TransformerBlock, block_function, get_preset
from xlafuse.models.functional import initial_params
from xlafuse.strategies import get_strategy

LLAMA = BlockConfig(name="llama", hidden_size=24, mlp_size=40, num_heads=4, num_kv_heads=2, head_dim=6)
GPT2 = BlockConfig(
    name="gpt2",
    hidden_size=24,
    mlp_size=40,
    num_heads=4,
    num_kv_heads=4,
    head_dim=6,
    norm="layer_norm",
    mlp="gelu",
    rope_theta=None,
    use_bias=True,
)
EXPERTS = dataclasses.replace(LLAMA, name="experts", num_experts=5, experts_per_token=2)

KERNELS = FusionPlan(
    attention_norm="mosaic",
    qkv_projection="mosaic",
    output_projection="mosaic",
    mlp_norm="mosaic",
    up_projection="mosaic",
    down_projection="mosaic",
)


def numpy_block(config: BlockConfig, params: dict, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The block with loops and complex numbers, and nothing shared with the implementation."""

    def norm(weights, x):
        if config.norm == "layer_norm":
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.epsilon)
            return x * weights["scale"] + weights["bias"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.epsilon) * weights["scale"]

    def linear(weights, x):
        return x @ weights["kernel"] + weights.get("bias", 0.0)

    def rope(x, position):
        if config.rope_theta is None:
            return x
        half = len(x) // 2
        turn = np.exp(1j * position * config.rope_theta ** (-np.arange(half) / half))
        turned = (x[:half] + 1j * x[half:]) * turn
        return np.concatenate([turned.real, turned.imag])

    batch, length, _ = x.shape
    size, group = config.head_dim, config.num_heads // config.num_kv_heads
    normed = norm(params["attention_norm"], x)
    query, key, value = (linear(params[name], normed) for name in ("query", "key", "value"))
    mixed = np.zeros((batch, length, config.num_heads * size))
    for b in range(batch):
        for head in range(config.num_heads):
            own = slice(head * size, (head + 1) * size)
            shared = slice(head // group * size, (head // group + 1) * size)
            for t in range(length):
                turned = rope(query[b, t, own], positions[b, t])
                last = t + 1 if config.is_causal else length
                scores = [turned @ rope(key[b, s, shared], positions[b, s]) / np.sqrt(size) for s in range(last)]
                weights = np.exp(scores - np.max(scores))
                mixed[b, t, own] = (weights / weights.sum()) @ value[b, :last, shared]
    x = x + linear(params["output"], mixed)
    normed = norm(params["mlp_norm"], x)
    if config.num_experts:
        return x + np.apply_along_axis(partial(numpy_experts, config, params["experts"]), -1, normed)
    up = linear(params["up"], normed)
    if config.mlp == "swiglu":
        gate = linear(params["gate"], normed)
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return x + linear(params["down"], hidden)


def numpy_experts(config: BlockConfig, params: dict, token: np.ndarray) -> np.ndarray:
    scores = token @ params["router"]
    best = np.argsort(scores)[-config.experts_per_token :]
    weights = np.exp(scores[best]) / np.exp(scores[best]).sum()
    gated = [token @ params["gate"][expert] for expert in best]
    hidden = [g / (1 + np.exp(-g)) * (token @ params["up"][expert]) for g, expert in zip(gated, best, strict=True)]
    return sum(w * (h @ params["down"][expert]) for w, h, expert in zip(weights, hidden, best, strict=True))


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, EXPERTS, dataclasses.replace(LLAMA, is_causal=False)], ids=lambda c: c.name
)
@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (3, 2)])
def test_block_is_what_numpy_computes(config, shape):
    config = dataclasses.replace(config, dtype="float64", param_dtype="float64")
    generator = np.random.default_rng(1)
    x = generator.standard_normal((*shape, config.hidden_size))
    positions = generator.integers(0, 1000, shape, dtype=np.int32)
    with jax.enable_x64(True):
        params = jax.tree.map(
            lambda w: np.asarray(w) + 0.3 * generator.standard_normal(w.shape), initial_params(config)
        )
        function, _ = block_function(config, shape)
        found = np.asarray(function(params, x, positions))
    np.testing.assert_allclose(found, numpy_block(config, params, x, positions), rtol=1e-9, atol=1e-9)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("preset", PRESETS)
def test_bfloat16_is_near_float32(preset):
    config = dataclasses.replace(get_preset(preset), hidden_size=256, mlp_size=512)
    experts = min(config.num_experts, 4)  # all of them: rounding may change a choice
    config = dataclasses.replace(config, num_experts=experts, experts_per_token=experts)
    params = initial_params(config)
    function, (_, x, *_) = block_function(config, (2, 8))
    wide, _ = block_function(dataclasses.replace(config, dtype="float32"), (2, 8))
    x = jax.random.normal(jax.random.key(3), x.shape, x.dtype)
    found, exact = function(params, x), wide(params, x.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    # Sums of a few hundred products, each rounded to 8 bits.
    np.testing.assert_allclose(found.astype(np.float32), exact, atol=0.06, rtol=0.02)


def test_llama_has_the_published_number_of_weights_and_none_is_made():
    function, arguments = block_function("llama3-8b", (2, 4096))
    leaves = jax.tree.leaves(arguments)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # 32 such layers, two embeddings of 128256 tokens and the last norm make the 8,030,261,248 of Llama 3 8B.
    weights = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))
    assert 32 * weights + 2 * 128256 * 4096 + 4096 == 8_030_261_248
    out = jax.eval_shape(function, *arguments)
    assert (out.shape, out.dtype) == ((2, 4096, 4096), jnp.bfloat16)


def test_gpt2_medium_has_the_published_number_of_weights():
    _, (params, *_) = block_function("gpt2-medium", (1, 8))
    # 24 such layers, 50257 token and 1024 position embeddings and the last norm: GPT-2 medium's 354,823,168.
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 24 * weights + (50257 + 1024) * 1024 + 2 * 1024 == 354_823_168


def test_weights_do_not_depend_on_the_plan():
    trees = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), block_function("llama3-8b", (1, 8), plan=plan)[1])
        for plan in (None, FusionPlan(attention="cudnn"), KERNELS)
    ]
    assert trees[0] == trees[1] == trees[2]


def test_pure_function_agrees_with_the_module():
    block = TransformerBlock(LLAMA, rngs=nnx.Rngs(5))
    function, _ = block_function(LLAMA, (2, 4))
    x = jax.random.normal(jax.random.key(0), (2, 4, LLAMA.hidden_size), jnp.bfloat16)
    np.testing.assert_array_equal(function(initial_params(LLAMA, seed=5), x), block(x))


def test_causal_block_does_not_look_ahead():
    function, _ = block_function(LLAMA, (1, 6))
    params = initial_params(LLAMA)
    x = jax.random.normal(jax.random.key(0), (1, 6, LLAMA.hidden_size), jnp.bfloat16)
    changed = x.at[:, 4:].add(1.0)
    before, after = function(params, x), function(params, changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.any(np.asarray(before[:, 4:] != after[:, 4:]))


def test_positions_count_from_zero_when_not_given():
    function, _ = block_function(LLAMA, (2, 6))
    params = initial_params(LLAMA)
    x = jax.random.normal(jax.random.key(0), (2, 6, LLAMA.hidden_size), jnp.bfloat16)
    counted = jnp.broadcast_to(jnp.arange(6), (2, 6))
    np.testing.assert_array_equal(function(params, x), function(params, x, counted))
    assert np.any(np.asarray(function(params, x) != function(params, x, 2 * counted)))


@pytest.mark.parametrize(
    ("preset", "sites"),
    [
        (
            "llama3-8b",
            "attention_norm qkv_projection rope attention output_projection attention_residual mlp_norm "
            "gate_up_projection activation down_projection mlp_residual",
        ),
        (
            "gpt2-medium",
            "attention_norm qkv_projection attention output_projection attention_residual mlp_norm up_projection "
            "activation down_projection mlp_residual",
        ),
        (
            "mixtral-8x7b",
            "attention_norm qkv_projection rope attention output_projection attention_residual mlp_norm router "
            "gate_up_projection activation down_projection experts_sum mlp_residual",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_every_operation_names_its_site(preset, sites, mode):
    function, arguments = block_function(preset, (1, 16))

    def gradient(params, x, *rest):
        return jax.grad(lambda params, x: function(params, x, *rest).astype(jnp.float32).sum(), argnums=(0, 1))(
            params, x
        )

    jaxpr = jax.make_jaxpr(function if mode == "forward" else gradient)(*arguments)
    names = {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}
    found = {site for site in sites.split() if any(site in name for name in names)}
    assert found == set(sites.split())
    # What has no site is the test's own sum over the output, which gives grad its scalar.
    nameless = {name for name in names if not any(site in name for site in sites.split())}
    assert nameless <= ({"jvp()", "transpose(jvp())"} if mode == "grad" else set())


@pytest.mark.parametrize("field", ["hidden_size", "num_heads", "head_dim"])
def test_sizes_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        dataclasses.replace(LLAMA, **{field: 0})


def test_heads_that_do_not_group_are_refused():
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 4 and 3"):
        dataclasses.replace(LLAMA, num_kv_heads=3)


def test_odd_head_dim_with_rope_is_refused():
    with pytest.raises(ValueError, match="head_dim must be even, got 7"):
        dataclasses.replace(LLAMA, head_dim=7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"experts_per_token": 6}, "between 1 and num_experts, or both 0, got 6 and 5"),
        ({"experts_per_token": 0}, "between 1 and num_experts, or both 0, got 0 and 5"),
        ({"mlp": "gelu"}, "experts are SwiGLU"),
    ],
)
def test_experts_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(EXPERTS, **changed)


def test_mixtral_has_the_published_number_of_weights():
    _, (params, *_) = block_function("mixtral-8x7b", (1, 8))
    # 32 such layers, two embeddings of 32000 tokens and the last norm: Mixtral 8x7B's 46,702,792,704.
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 32 * weights + 2 * 32000 * 4096 + 4096 == 46_702_792_704


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown preset 'llama-8b'; did you mean 'llama3-8b'"):
        block_function("llama-8b", (1, 8))


@pytest.mark.parametrize("shape", [(4096,), (0, 8), (2, 8, 4096)])
def test_shape_that_is_not_batch_and_length_is_refused(shape):
    with pytest.raises(ValueError, match=r"\(batch, length\)"):
        block_function("tiny", shape)


def test_input_of_another_width_is_refused():
    block = TransformerBlock(LLAMA, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"\(batch, length, 24\), got \(1, 2, 25\)"):
        block(jnp.zeros((1, 2, 25), jnp.bfloat16))


def test_plan_refuses_an_implementation_that_a_site_does_not_have():
    with pytest.raises(UnknownNameError, match=r"site 'attention': 'cudn' is unknown|unknown implementation.*'cudnn'"):
        FusionPlan(attention="cudn")
    with pytest.raises(ValueError, match="'mlp_norm' 'cudnn'"):
        FusionPlan(mlp_norm="cudnn")


@pytest.mark.parametrize(
    ("changed", "plan", "reason"),
    [
        ({"dtype": "float64"}, KERNELS, "x is float64"),
        ({"mlp_size": 96}, FusionPlan(up_projection="mosaic"), "w is 4096 by 96"),
    ],
    ids=str,
)
def test_plan_that_the_block_cannot_use_says_why(changed, plan, reason):
    with jax.enable_x64(True):
        config = dataclasses.replace(get_preset("llama3-8b"), **changed)
        function, arguments = block_function(config, (1, 8), plan=plan)
        mesh = mesh_of_one(load_target("h200"))
        with jax.sharding.use_abstract_mesh(mesh), pytest.raises(InapplicablePlanError, match=reason):
            jax.eval_shape(function, *arguments)


def test_best_is_what_each_operation_takes():
    def taken(kind, shape, **changed):
        device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
        mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=device)
        config = dataclasses.replace(get_preset("llama3-8b"), **changed)
        function, arguments = block_function(config, shape, plan=get_strategy("best").plan)
        with jax.sharding.use_abstract_mesh(mesh), recorded_choices() as choices:
            jax.eval_shape(function, *arguments)
        return {(choice.operation, choice.taken) for choice in choices}

    operations = ("rms_norm", "qkv_projection", "attention", "linear", "gated_linear")
    assert taken("NVIDIA H200", (2, 4096)) == {(operation, "mosaic") for operation in operations}
    token = taken("NVIDIA H200", (1, 1))
    assert ("attention", "xla") in token  # it sees itself alone
    assert ("linear", "mosaic") in token
    assert ("rms_norm", "mosaic") not in token  # the products compute it
    narrow = taken("NVIDIA H200", (2, 4096), hidden_size=96)
    assert {operation for operation, name in narrow if name == "mosaic"} == {"attention"}
    assert {name for _, name in taken("NVIDIA A100-SXM4-80GB", (2, 4096))} == {"xla"}
    assert ("gated_linear", "mosaic") in taken("NVIDIA H200", (2, 4096), use_bias=True)


def test_a_kernel_without_its_gpu_is_refused_in_its_own_words():
    function, arguments = block_function("tiny", (1, 8), plan=FusionPlan(mlp_norm="mosaic"))
    with pytest.raises(NotImplementedError, match=r"rms_norm cannot run as asked.*Hopper"):
        jax.eval_shape(function, *arguments)


def test_few_rows_are_normalised_by_the_product_behind():
    def launches(shape, mode):
        function, arguments = block_function("llama3-8b", shape, plan=get_strategy("pallas").plan)

        def loss(*arguments):
            return jnp.sum(function(*arguments).astype(jnp.float32))

        with jax.sharding.use_abstract_mesh(mesh_of_one(load_target("h200"))):
            return str(jax.make_jaxpr({"forward": loss, "grad": jax.grad(loss)}[mode])(*arguments))

    assert "rms_norm" not in launches((16, 1), "forward")
    assert "rms_norm" in launches((17, 1), "forward")
    assert "rms_norm" in launches((16, 1), "grad")  # which needs the normalised rows


def test_best_over_an_explicit_mesh_has_kernels_where_each_device_is_by_itself():
    """Values and gradients of this were compared on two CPU devices, too; that takes 15 s."""
    config = dataclasses.replace(get_preset("tiny"), hidden_size=128, mlp_size=128)
    function, arguments = block_function(config, (2, 8), plan=get_strategy("best").plan)
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    split, same = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def cut(argument, spec):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), argument)

    params, x, positions = arguments
    arguments = (cut(params, same), cut(x, split), cut(positions, split))
    apart = jax.shard_map(function, in_specs=(same, split, split), out_specs=split)
    with jax.sharding.use_abstract_mesh(mesh), plgpu.force_gpu_interpret_mode():
        texts = [str(jax.make_jaxpr(each)(*arguments)) for each in (apart, function)]
    assert ["mpmd_map" in text or "pallas_call" in text for text in texts] == [True, False]


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_gradients_of_a_sharded_batch_are_summed_over_the_devices(norm):
    config = dataclasses.replace(get_preset("tiny"), norm=norm)
    plan = FusionPlan(attention_norm="mosaic", mlp_norm="mosaic", up_projection="mosaic")
    function, (params, x, _) = block_function(config, (2, 8), plan=plan)

    def gradients(params, x):
        return jax.grad(lambda params: jnp.sum(function(params, x).astype(jnp.float32)))(params)

    # Tracing checks that what is said to be the same on all devices is.
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    same, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    with plgpu.force_gpu_interpret_mode():
        sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(same, split), out_specs=same)
        jaxpr = jax.make_jaxpr(sharded)(params, x)
    assert str(jaxpr).count("psum") >= len(jax.tree.leaves(params))
