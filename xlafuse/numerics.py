"""Checks that a plan computes the right numbers: runs it on the CPU and measures errors against float64.

The bound is relative to the baseline's own error in the same dtype, as usual for low-precision kernels: a plan passes
if its error is at most twice that of the plain program, plus one unit in the last place. An absolute tolerance would
either hide errors in a small norm or fail a correct sum over a long row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hlo_analysis.records import Numerics
from xlafuse.models.config import BlockConfig
from xlafuse.models.functional import block_function, initial_params
from xlafuse.models.plan import FusionPlan

Mode = Literal["forward", "grad"]


def reduced(config: BlockConfig) -> BlockConfig:
    """Returns the same block at a size for the CPU: hidden size at most 256 and at most 4 heads of keys.

    The kinds of norm and MLP and the ratio of query heads to key heads stay the same.
    """
    kv_heads = min(config.num_kv_heads, 4)
    return dataclasses.replace(
        config,
        num_heads=kv_heads * (config.num_heads // config.num_kv_heads),
        num_kv_heads=kv_heads,
        hidden_size=min(config.hidden_size, 256),
        mlp_size=min(config.mlp_size, 512),
        head_dim=min(config.head_dim, 64),
        # Every token goes to all experts: a choice that rounding changes would look like an error.
        num_experts=(experts := min(config.num_experts, 4)),
        experts_per_token=experts,
    )


def check_plans(
    config: BlockConfig,
    plans: Mapping[str, FusionPlan],
    *,
    mode: Mode = "forward",
    shape: tuple[int, int] = (2, 16),
    seed: int = 0,
) -> dict[str, Numerics | str]:
    """Runs each plan on the CPU at a reduced size of `config` and measures its error against float64.

    Inputs and cotangents are random normal in `config.dtype`. The weights are the block's initial ones, with perturbed
    norm scales and biases. Mode "grad" compares the gradients of every weight and of `x`. Mosaic kernels run in Pallas'
    interpret mode. An error is the largest difference in an array divided by the array's largest magnitude; of several
    arrays, the one closest to its bound is reported. A plan that cannot run here gets a sentence instead of a record.
    """
    small = reduced(config)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arguments, cotangent = _inputs(small, shape, seed)
        reference = _run_float64(small, shape, arguments, cotangent, mode)
        baseline = _run(small, shape, FusionPlan(), arguments, cotangent, mode)
        results: dict[str, Numerics | str] = {}
        for name, plan in plans.items():
            if plan.attention == "cudnn":
                results[name] = "Numerics not checked: cuDNN attention runs on a GPU only."
                continue
            try:
                runs = _interpretable(plan)
                output = baseline if not runs.fused_sites else _run(small, shape, runs, arguments, cotangent, mode)
            except NotImplementedError as error:
                results[name] = f"Numerics not checked: {error}"
                continue
            error, baseline_error, passed = judge(output, baseline, reference)
            results[name] = Numerics(
                shape=f"{shape[0]}x{shape[1]}x{small.hidden_size}",
                dtype=small.dtype,
                error=error,
                baseline_error=baseline_error,
                passed=passed,
                note=_note(small, plan, mode),
            )
    return results


def _interpretable(plan: FusionPlan) -> FusionPlan:
    """Returns `plan` without our attention: jax's interpreter does not support its initialized accumulators."""
    return dataclasses.replace(plan, attention="xla") if plan.attention in ("mosaic", "best") else plan


def judge(output: Any, baseline: Any, reference: Any) -> tuple[float, float, bool]:
    """Applies the rule `error <= 2 * baseline_error + ulp` to each array of three equal trees.

    Returns error and baseline error of the array closest to its bound, and whether all arrays keep their bounds. The
    unit in the last place is that of the array's largest magnitude, in the output's dtype. An array fails if it has a
    NaN or an infinity that the reference does not have.
    """
    rows: list[tuple[float, float, float]] = []
    exacts = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(reference)]
    magnitudes = [float(np.max(np.abs(exact), initial=0.0)) for exact in exacts]
    largest = max(magnitudes, default=0.0) or 1.0
    for ours, plain, exact, magnitude in zip(
        jax.tree.leaves(output), jax.tree.leaves(baseline), exacts, magnitudes, strict=True
    ):
        # An array may be zero up to float64's rounding, such as the gradient of the key's bias, which softmax cancels.
        # It has no scale of its own.
        scale = magnitude if magnitude > 1e-9 * largest else largest
        error, baseline_error = (_largest_error(each, exact) / scale for each in (ours, plain))
        rows.append((error, baseline_error, 2 * baseline_error + float(jnp.finfo(ours.dtype).eps)))
    error, baseline_error, _ = max(rows, key=lambda row: row[0] / row[2] if np.isfinite(row[0]) else np.inf)
    return error, baseline_error, all(row[0] <= row[2] for row in rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandCheck:
    """Result of a call with real values up to and including one operand.

    operand: "" for the call in which every operand of `neutral` is neutral.
    """

    operand: str
    error: float
    baseline_error: float
    passed: bool


def isolate(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Mapping[str, Any],
    neutral: Mapping[str, Any],
) -> tuple[OperandCheck, ...]:
    """Finds the operand that a fused function gets wrong, by adding one operand at a time and applying `judge`.

    In the first call all operands of `neutral` are neutral; each further call takes one more of them from `arguments`.
    The operand of the first check that fails is the wrong one. If that operand is "", the error is in what every call
    computes.

    Args:
        ours: the fused function, called with keyword arguments.
        reference: the same in plain `jax.numpy`. Called with float64 arguments it gives the reference, and in the
            arguments' own dtypes the baseline.
        arguments: all operands, arrays.
        neutral: for operands that can be left out, the values that change nothing, such as zeros for a bias, in the
            order in which the function applies them.

    Raises:
        ValueError: an operand in `neutral` is not in `arguments`.
    """
    if unknown := [name for name in neutral if name not in arguments]:
        raise ValueError(f"neutral has values for {', '.join(unknown)}, arguments only for {', '.join(arguments)}.")
    checks = []
    for count, operand in enumerate(("", *neutral)):
        given = dict(arguments) | {name: neutral[name] for name in list(neutral)[count:]}
        with jax.enable_x64(True):
            wide = {name: np.asarray(value).astype(np.float64) for name, value in given.items()}
            exact = jax.device_get(reference(**wide))
        error, baseline_error, passed = judge(jax.device_get(ours(**given)), jax.device_get(reference(**given)), exact)
        checks.append(OperandCheck(operand=operand, error=error, baseline_error=baseline_error, passed=passed))
    return tuple(checks)


def _largest_error(value: Any, exact: np.ndarray) -> float:
    difference = np.abs(np.asarray(value).astype(np.float64) - exact)
    return float(np.max(np.where(np.isnan(difference), np.inf, difference), initial=0.0))


def _inputs(config: BlockConfig, shape: tuple[int, int], seed: int) -> tuple[tuple[Any, ...], np.ndarray]:
    """Returns weights, x and positions for `block_function`, and a cotangent, as NumPy arrays."""
    generator = np.random.default_rng(seed)
    _, abstract = block_function(config, shape)

    def normal(like: Any) -> np.ndarray:
        return generator.standard_normal(like.shape).astype(like.dtype)

    def disturb(weight: Any) -> np.ndarray:
        weight = np.asarray(weight)
        # Norm scales start as ones and biases as zeros, so that a kernel that ignores them would pass.
        return weight if weight.ndim > 1 else (weight + 0.25 * normal(weight)).astype(weight.dtype)

    params = jax.tree.map(disturb, initial_params(config, seed=seed))
    # Positions in the middle of a sequence, so that RoPE rotates the first token too.
    positions = (np.broadcast_to(np.arange(shape[1], dtype=np.int32) + 7, shape),) if len(abstract) == 3 else ()
    return (params, normal(abstract[1]), *positions), normal(abstract[1])


def _run(
    config: BlockConfig,
    shape: tuple[int, int],
    plan: FusionPlan,
    arguments: tuple[Any, ...],
    cotangent: np.ndarray,
    mode: Mode,
) -> Any:
    function, _ = block_function(config, shape, plan=plan)

    def gradient(params: Any, x: Any, *rest: Any) -> Any:
        _, pullback = jax.vjp(lambda params, x: function(params, x, *rest), params, x)
        return pullback(jnp.asarray(cotangent))

    with _interpreted(plan):
        return jax.device_get(jax.jit(gradient if mode == "grad" else function)(*arguments))


def _run_float64(
    config: BlockConfig, shape: tuple[int, int], arguments: tuple[Any, ...], cotangent: np.ndarray, mode: Mode
) -> Any:
    wide = dataclasses.replace(config, dtype="float64", param_dtype="float64")

    def widen(array: np.ndarray) -> np.ndarray:
        return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64)

    # The setting is thread-local and undone on leaving, so that the caller's own stays.
    with jax.enable_x64(True):
        return _run(wide, shape, FusionPlan(), jax.tree.map(widen, arguments), widen(cotangent), mode)


def _interpreted(plan: FusionPlan) -> contextlib.AbstractContextManager[Any]:
    if not {"mosaic", "best"} & set(plan.fused_sites.values()):
        return contextlib.nullcontext()
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())


def _note(config: BlockConfig, plan: FusionPlan, mode: Mode) -> str:
    what = "output" if mode == "forward" else "gradients"
    how = (
        "its Mosaic kernels in interpret mode"
        if plan.fused_sites
        else "the plain program, which this strategy's compile options do not change on a CPU"
    )
    if plan.attention in ("mosaic", "best"):
        how += ", all but attention, which is plain here"
    return f"{what} of {config.name} at hidden size {config.hidden_size} on the CPU, {how}, against float64"
