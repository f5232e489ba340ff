"""Study of a fused kernel with one wrong operand, found by adding operands one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layer_norm
from pallas_kernels.ops.norms.reference import layer_norm_reference
from xlafuse.numerics import isolate
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult

_ROWS, _FEATURES = 16, 512
Operands = Mapping[str, Any]


def reference(x: Any, residual: Any, scale: Any, bias: Any) -> Any:
    """LayerNorm of a residual sum, in the dtype of its arguments and at least float32."""
    return layer_norm_reference(jnp.asarray(x + residual), jnp.asarray(scale), jnp.asarray(bias), epsilon=1e-6)


def kernel(x: Any, residual: Any, scale: Any, bias: Any) -> Any:
    """Computes `reference` with the fused kernel."""
    return layer_norm(x, scale, bias, residual=residual, implementation="mosaic")[0]


FAULTS: dict[str, Callable[[Operands], Operands]] = {
    "none": lambda given: given,
    "residual": lambda given: {**given, "residual": given["residual"].at[:, 0].set(0)},
    "scale": lambda given: {**given, "scale": jnp.roll(given["scale"], 1)},
    "bias": lambda given: {**given, "bias": given["bias"].at[-8:].set(0)},
}
"""Faulty operands by name, as if the kernel had skipped a column or read one value too far."""


def _faulty(change: Callable[[Operands], Operands], **given: Any) -> Any:
    return jax.jit(kernel)(**jax.block_until_ready(change(given)))


def _count(target: str) -> Iterator[Row | str]:
    """Counts on the CPU with the interpreter, whatever the target."""
    generator = np.random.default_rng(0)
    shapes = {"x": (_ROWS, _FEATURES), "residual": (_ROWS, _FEATURES), "scale": (_FEATURES,), "bias": (_FEATURES,)}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        values = {name: jnp.asarray(generator.standard_normal(shape), jnp.bfloat16) for name, shape in shapes.items()}
        jax.block_until_ready(values)  # the interpreter's callbacks share few threads with whatever runs beside them
        neutral = {name: jnp.full_like(values[name], name == "scale") for name in ("residual", "scale", "bias")}
        for fault, change in FAULTS.items():
            with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
                checks = isolate(functools.partial(_faulty, change), reference, values, neutral)
            wrong = next((check.operand for check in checks if not check.passed), "none")
            errors = {f"error_with_{check.operand or 'x'}": check.error for check in checks}
            yield Row(
                case=f"fault: {fault}", variant=f"found: {wrong}", values={"found": float(wrong == fault), **errors}
            )


def _conclude(result: StudyResult) -> Conclusion:
    found = sum(row.values["found"] for row in result.rows)
    silent = [row for row in result.rows if row.case != "fault: none"]
    smallest = min(max(value for name, value in row.values.items() if name != "found") for row in silent)
    return Conclusion(
        sentences=(
            f"Of {len(result.rows)} kernels, one right and {len(silent)} with one operand wrong, `isolate` names the "
            f"operand of {found:.0f}.",
            f"The whole output of the least wrong one is off by {smallest:.2g} of its largest value: a comparison of "
            "outputs shows that, but not where it comes from.",
            f"It took {len(silent) + 1} calls each, on the CPU, at {_ROWS} × {_FEATURES}.",
        ),
        findings=(
            Finding(
                ours=f"{found:.0f} of {len(result.rows)} found",
                verdict="holds in part" if found == len(result.rows) else "holds",
                reason="Hard by the output alone; with a reference in parts it is a few calls.",
            ),
        ),
    )


STUDY = Study(
    name="debugging",
    title="A fused kernel that is wrong",
    claims=(Claim("Errors in a fused kernel are hard to isolate", "no figure", "Kernel Fusion"),),
    count=_count,
    conclude=_conclude,
    quantity=("found", "found"),
)
