"""The benchmark of public models without a GPU: each phase runs and is checked, with invented times."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_in_process

from xlafuse.bench import candidates
from xlafuse.bench.candidates import check_close
from xlafuse.bench.public import bench, configs, generation, sizes, sources, torch_process
from xlafuse.bench.public.bench import bench_public
from xlafuse.bench.public.flops import product_flops
from xlafuse.bench.public.generation import Generation
from xlafuse.bench.public.programs import KEY, Program, PublicModel, importing, linen_program, tokens_of
from xlafuse.bench.public.sizes import ROOM, Stack
from xlafuse.bench.results import ShapeResult
from xlafuse.bench.settings import PublicSettings
from xlafuse.bench.text import result_lines

SIZES = Stack(batch=2, length=8, width=256, layers=2, vocabulary=64)


class _Model(nn.Module):
    """Norms and a head."""

    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(SIZES.vocabulary, SIZES.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = nn.RMSNorm(dtype=self.dtype)(x + nn.Dense(SIZES.width, dtype=self.dtype)(nn.RMSNorm()(x)))
        return nn.Dense(SIZES.vocabulary, dtype=self.dtype)(x)


def _make(folder: Path, dtype: Any, sizes: Stack) -> Program:
    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)

    def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.square(logits.astype(jnp.float32) - tokens[..., None]).mean()

    return linen_program(_Model(sizes.layers, dtype), (tokens,), {}, loss, size=str(sizes), batch=(tokens, KEY))


def _missing(folder: Path, dtype: Any, sizes: Stack) -> Program:
    with importing(folder / "nowhere"):
        raise AssertionError


MODELS = tuple(PublicModel(name, "", {"tiny": SIZES}, make) for name, make in (("norms", _make), ("lost", _missing)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch, invented_times):
    monkeypatch.setattr(bench, "MODELS", MODELS)
    monkeypatch.setattr(bench, "WALL_SECONDS", 0.0)
    monkeypatch.setattr(candidates, "peak", lambda _: 1e12)


def measured(item: str, **changes: Any) -> ShapeResult:
    given: dict[str, Any] = {"checkouts": Path(), "size": "tiny", "strategies": ("xla", "fused"), "rounds": 1}
    (result,) = bench_public(item, PublicSettings(**{**given, "calls": 2, **changes}))
    assert isinstance(result, ShapeResult)
    return result


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_a_phase_is_measured_beside_plain_xla(phase):
    strategies = ("xla", "fused", "fused_allowed", "best")
    result = measured(f"norms {phase}", strategies=strategies, layers=1)
    assert (result.op, result.phase, result.spec) == ("norms", phase, "2 x 8, width 256, 1 layer")
    xla, fused = result.candidates
    assert (xla.name, fused.name) == ("xla", "fused")
    assert 0 <= fused.error < 0.02
    for each in result.candidates:
        assert each.compile_seconds > 0
        assert each.peak_bytes > result.bytes * (3 if phase == "train" else 1)
        assert each.tokens_per_second == pytest.approx(16 / each.timing.wall_us * 1e6)
        flops = 2 * 16 * 256 * (256 + 64) * (3 if phase == "train" else 1)
        assert each.flops_share == pytest.approx(flops / each.timing.wall_us / 1e6)
    told = {problem.candidate: problem.message for problem in result.problems}
    assert "the same sites as fused" in told["fused_allowed"]
    assert "sites of a transformer block" in told["best"]
    assert "tokens/s" in result_lines(result)[1]


def test_a_step_goes_on_with_the_weights_of_the_last_one(monkeypatch):
    losses = []
    advance = bench.PHASES["train"].advance
    watched = {"advance": lambda given, result: losses.append(float(result[2])) or advance(given, result)}
    phase = type(bench.PHASES["train"])(**{**vars(bench.PHASES["train"]), **watched})
    monkeypatch.setitem(bench.PHASES, "train", phase)
    measured("norms train")
    assert losses[0] == pytest.approx(losses[1], rel=0.01)  # each strategy is checked from the first weights
    assert losses[1:] == sorted(losses[1:], reverse=True)
    assert losses[-1] < 0.99 * losses[1]


def _generation(folder: Path, dtype: Any, sizes: Stack) -> Generation:
    """A cache of each token's logits, (sequences, length, 1, vocabulary), whose mean is added to the last ones."""
    model = _Model(sizes.layers, dtype)

    def forward(params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        entries, length = cache
        logits: Any = model.apply(params, tokens)
        entries = jax.lax.dynamic_update_slice(entries, logits[:, :, None], (0, length, 0, 0))
        seen = (jnp.arange(sizes.length) <= length)[:, None, None]
        return logits[:, -1] + jnp.mean(entries * seen, (1, 2)), (entries, length + 1)

    tokens = tokens_of(sizes.batch, sizes.length, sizes.vocabulary)
    return Generation(
        size=str(sizes),
        tokens=tokens,
        init=lambda key: jax.tree.map(lambda a: a.astype(dtype), model.init(key, tokens[:, :1])),
        empty=lambda: (jnp.zeros((sizes.batch, sizes.length, 1, sizes.vocabulary), dtype), jnp.int32(0)),
        forward=forward,
    )


def test_a_call_of_decoding_generates_tokens_after_the_same_prompt(monkeypatch):
    found, phase = [], bench.PHASES["decode"]

    def advance(given: Any, result: Any) -> Any:
        found.append((given[1].shape, np.asarray(result[0]), int(result[1][1])))
        return phase.advance(given, result)

    watched = {**vars(phase), "advance": advance}
    monkeypatch.setitem(bench.PHASES, "decode", type(phase)(**watched))
    monkeypatch.setitem(generation.GENERATIONS, "norms", _generation)
    result = measured("norms decode", calls=4)
    assert (result.spec, result.unit) == ("8 x 1024, width 256, 2 layers", "tokens")
    xla, fused = result.candidates
    assert 0 < fused.error < 0.02
    assert xla.tokens_per_second == pytest.approx(8 / xla.timing.wall_us * 1e6)
    assert len(found) > 8
    for shape, tokens, length in found:
        assert (shape, tokens.shape, length) == ((8, 1), (8, ROOM), 1024 - ROOM)
    assert np.any(found[0][1] != found[0][1][:, :1])


def test_a_loop_generates_the_tokens_of_its_steps_at_every_call():
    made = _generation(Path(), jnp.float32, replace(SIZES, length=2 * ROOM))
    params = made.init(jax.random.key(0))
    token, cache = made.prompted(params)
    generate = jax.jit(made.generating(made.step))
    found, after = generate(params, token, cache)
    again, _ = generate(params, token, after)
    np.testing.assert_array_equal(again, found)
    for place in range(ROOM):
        token, cache = jax.jit(made.step)(params, token, cache)
        np.testing.assert_array_equal(found[:, place], token[:, 0])


def test_decoding_compares_what_the_first_step_writes():
    entries = jnp.zeros((2, 1024, 1, 4)).at[:, : 1025 - ROOM].set(1.0)
    cache = entries, jnp.int32(1024 - ROOM)
    (written,) = bench.PHASES["decode"].compared((jnp.zeros((2, ROOM), jnp.int32), cache))["written"]
    assert written.shape == (2, 1, 4)
    assert jnp.all(written == 1.0)


def test_a_program_that_fails_leaves_the_others_their_arguments(monkeypatch):
    called = candidates.Chain.call
    calls = []

    def call(chain, program):
        calls.append(program)
        if len(calls) == 4:
            called(chain, lambda *_: 1 / 0)
        return called(chain, program)

    monkeypatch.setattr(candidates.Chain, "call", call)
    result = measured("norms train")
    assert len(result.candidates) == 1
    assert "ZeroDivisionError" in result.problems[0].message


def test_gradients_that_differ_are_a_problem_though_the_loss_is_the_same():
    expected = {"loss": jnp.float32(10.0), "gradients": [jnp.ones(4) * 1e-3, jnp.arange(3)]}
    almost = {**expected, "gradients": [jnp.ones(4) * 1.01e-3, jnp.arange(3)]}
    assert check_close(almost, expected) == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(AssertionError, match="gradients is off by 1 of its norm from xla's"):
        check_close({**expected, "gradients": [jnp.zeros(4), jnp.arange(3)]}, expected)
    with pytest.raises(AssertionError, match="loss is off by nan"):
        check_close({**expected, "loss": jnp.float32(jnp.nan)}, expected)


def test_problems_do_not_name_this_machines_folders(monkeypatch, tmp_path):
    def refused(_):
        raise NotImplementedError(f"{tmp_path}/flax/nn/linear.py:3: no site")

    monkeypatch.setattr(bench, "get_strategy", refused)
    (problem,) = measured("norms forward", strategies=("fused",), checkouts=tmp_path).problems
    assert problem.message == "NotImplementedError: flax/nn/linear.py:3: no site"


def test_a_model_that_cannot_be_imported_and_no_time_left_are_told():
    (told,) = bench_public("lost forward", PublicSettings(checkouts=Path(), size="tiny"))
    assert told == (
        "lost forward: the model cannot be made: ModuleNotFoundError: no folder nowhere among the checkouts"
    )
    (told,) = bench_public("norms forward", PublicSettings(checkouts=Path(), until=0.0))
    assert told == "norms forward: not begun, the time was up"


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (jnp.matmul, [(4, 8), (8, 16)], 2 * 4 * 8 * 16),
        (jax.checkpoint(jax.jit(lambda x, w: jax.nn.gelu(x @ w))), [(4, 8), (8, 16)], 2 * 4 * 8 * 16),
        (jax.grad(lambda x, w: jnp.sum(x @ w) ** 2, (0, 1)), [(4, 8), (8, 16)], 3 * 2 * 4 * 8 * 16),
        (lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, 5), [(4, 8), (8, 8)], 5 * 2 * 4 * 8 * 8),
        (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), [(4, 8), (8, 8)], 2 * 4 * 8 * 8),
    ],
    ids=["product", "inside", "gradient", "loop", "branch"],
)
def test_flops_of_products(function, shapes, flops):
    assert product_flops(function, *(jnp.zeros(shape) for shape in shapes)) == flops


def test_flops_of_convolutions_and_groups():
    def convolved(x, w):
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", feature_group_count=2)) ** 2

    image, kernel = jnp.zeros((2, 4, 6, 6)), jnp.zeros((8, 2, 3, 3))
    forward = 2 * 2 * 8 * 9 * 2 * 9
    assert product_flops(convolved, image, kernel) == forward
    assert product_flops(jax.grad(convolved, (0, 1)), image, kernel) == 3 * forward

    def grouped(x, w):
        return jnp.sum(jax.lax.ragged_dot(x, w, jnp.asarray([1, 3]))) ** 2

    assert product_flops(jax.grad(grouped, (0, 1)), jnp.zeros((4, 8)), jnp.zeros((2, 8, 16))) == 3 * 2 * 4 * 8 * 16


@pytest.fixture
def stand_in(monkeypatch):
    """A process that answers as PyTorch's would."""
    monkeypatch.setattr(torch_process, "_serve", stand_in_process.serve)
    monkeypatch.setattr(torch_process, "MODELS", ("norms",))
    monkeypatch.setattr(torch_process, "find_spec", lambda _: True)


@pytest.mark.usefixtures("stand_in")
def test_pytorchs_process_takes_turns_and_its_failures_are_its_own():
    result = measured("norms forward", peers=("torch_eager", "torch_compile"))
    assert [each.name for each in result.candidates] == ["xla", "fused", "torch_compile"]
    peer = result.candidates[-1]
    assert (peer.kind, peer.compile_seconds, peer.peak_bytes, peer.error) == ("peer", 3.0, 7, None)
    assert (peer.timing.wall_us, peer.timing.kernels) == (5.0, ("a",))
    assert [problem.message for problem in result.problems] == ["TorchError: OutOfMemoryError: too large"]


@pytest.mark.usefixtures("stand_in")
def test_a_crash_of_pytorchs_process_leaves_the_strategies():
    result = measured("norms forward", peers=("torch_max_autotune",))
    assert [each.name for each in result.candidates] == ["xla", "fused"]
    assert "PyTorch's process ended with exit code 9" in result.problems[0].message


@pytest.mark.usefixtures("stand_in")
def test_a_process_without_an_answer_is_ended(monkeypatch):
    monkeypatch.setattr(torch_process, "_SECONDS", 0.0)
    with torch_process.TorchProcess("norms", "train", "tiny", 1) as process:
        for _ in range(2):
            with pytest.raises(torch_process.TorchError, match="gave no answer in 0 s"):
                process.candidate("torch_compile")


def test_absent_pytorch_and_models_that_it_lacks_are_told(monkeypatch):
    monkeypatch.setattr(torch_process, "find_spec", lambda _: None)
    (problem,) = measured("norms forward", peers=("torch_eager",)).problems
    assert (problem.kind, "PyTorch's norms is not written here" in problem.message) == ("unsupported", True)
    with pytest.raises(ModuleNotFoundError, match="PyTorch is not installed"):
        torch_process.TorchProcess("gpt2", "train", "tiny", 1)


def test_the_models_in_pytorch_are_those_that_are_named():
    source = Path(bench.__file__).with_name("torch_models.py").read_text(encoding="utf-8")
    assert re.findall(r'^    "(\w+)": \(sizes', source, re.MULTILINE) == list(torch_process.MODELS)
    assert set(torch_process.MODELS) <= {model.name for model in sources.MODELS}
    assert set(bench.PHASES["decode"].models) <= set(torch_process.MODELS)


def test_configurations_that_both_share_have_the_published_numbers():
    assert configs.mamba2(sizes.MAMBA2["real"]) == {
        "vocab_size": 50288,
        "hidden_size": 1536,
        "num_hidden_layers": 48,
        "head_dim": 64,
        "state_size": 128,
        "chunk_size": 256,
    }
    found = configs.unet(sizes.UNET["real"])
    assert found["down_block_types"] == ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    assert found["up_block_types"] == ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
