"""Study of a fused chain that grows value by value until registers spill."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult
from xlafuse.studies.variants import Case, Variant, count_variants, time_variants

_ROWS, _COLUMNS = 16384, 1024
"""A block has a row: eight values a thread."""
_LIVE = (1, 8, 16, 24, 32, 48, 64)
_KERNEL, _XLA = "one kernel, a row a block", "XLA"
_REGISTERS, _THREADS = 65536, 2048
"""Registers and threads of a multiprocessor of every target here."""
_LAYOUT = plgpu.Layout.WG_STRIDED((_COLUMNS,), vec_size=4)


def chain(x: jax.Array, live: int) -> jax.Array:
    """Computes values that each need the one before, then sums them from the last, so that all are live at once."""
    values = [x]
    for i in range(live - 1):
        values.append(values[-1] * (0.5 + 0.01 * i) + 0.25)
    total = values[-1]
    for value in reversed(values[:-1]):
        total = total * 0.5 - value * total
    return total


def fused(x: jax.Array, live: int) -> jax.Array:
    """Runs `chain` on (rows, 1024) float32 in one kernel, which holds a row in registers."""

    def body(x_ref, y_ref):
        row = lax.axis_index("row")
        y_ref[row] = chain(plgpu.load(x_ref.at[row], layout=_LAYOUT, optimized=False), live)

    return settings.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x)


def _cases() -> list[Case]:
    return [
        Case(
            name=f"{live} live values",
            arguments=(jax.ShapeDtypeStruct((_ROWS, _COLUMNS), jnp.float32),),
            variants={
                _KERNEL: Variant(function=functools.partial(fused, live=live)),
                _XLA: Variant(function=functools.partial(chain, live=live), is_counted=False),
            },
        )
        for live in _LIVE
    ]


def _count(target: str):
    for row in count_variants(_cases(), target):
        if not isinstance(row, Row):
            yield row
        elif registers := row.values.get("registers"):
            # Registers are allocated to a warp in units of 8 a thread.
            warps = min(_THREADS // 32, _REGISTERS // (int(-(-registers // 8) * 8) * 32) // 4 * 4)
            yield Row(case=row.case, variant=row.variant, values={**row.values, "occupancy": warps * 32 / _THREADS})
        else:
            yield row


def _conclude(result: StudyResult) -> Conclusion:
    registers = {case: result.value(case, _KERNEL, "registers") for case in result.cases}
    spills = {case: result.value(case, _KERNEL, "spill_bytes") for case in result.cases}
    first = next((case for case in result.cases if spills[case] > 0), None)
    least, last = result.cases[0], result.cases[-1]
    sentences = (
        f"The kernel takes {registers[least]:.0f} registers a thread for {least}, "
        + (f"and spills from {first} on ({spills[first]:.0f} bytes)." if first else "and never spills."),
        f"Occupancy falls from {result.value(least, _KERNEL, 'occupancy'):.0%} to "
        f"{min(result.value(case, _KERNEL, 'occupancy') for case in result.cases):.0%} on the way.",
    )
    time = [result.value(case, _KERNEL, "us") for case in result.cases]
    if not result.has("us") or first is None:
        ours = f"spills from {first} on" if first else "no spill"
        return Conclusion(
            sentences=(*sentences, "What that costs has not been timed yet."),
            findings=(Finding(ours=ours, verdict="holds" if first else "does not hold"),),
        )
    before = result.cases[result.cases.index(first) - 1]
    return Conclusion(
        sentences=(
            *sentences,
            f"Time goes from {time[0]:.0f} µs to {result.value(before, _KERNEL, 'us'):.0f} µs before it spills, and to "
            f"{time[-1]:.0f} µs at {last}; XLA's kernel, with one to four values a thread, takes "
            f"{result.value(last, _XLA, 'us'):.0f} µs there.",
        ),
        findings=(
            Finding(
                ours=f"spills from {first} on: {time[0]:.0f} → {time[-1]:.0f} µs",
                verdict="holds" if time[-1] > 1.1 * time[0] else "holds in part",
                reason="What counts is how many values are live at once, not how many operations there are.",
            ),
        ),
    )


STUDY = Study(
    name="fuse_or_spill",
    title="Fuse until registers spill",
    claims=(
        Claim(
            "Too many operations exceed registers and shared memory, and occupancy falls",
            "65,536 registers a multiprocessor",
            "Kernel Fusion; Fused Kernels in LLMs",
        ),
    ),
    count=_count,
    time=lambda: time_variants(_cases()),
    conclude=_conclude,
)
