"""Study of operations that one kernel cannot join: reductions over different axes, transposed operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xlafuse.studies.records import Claim, Conclusion, Finding, Study, StudyResult
from xlafuse.studies.variants import Case, Variant, count_variants

_PROGRAMS = {
    "rows, then rows": lambda x: jnp.max(jax.nn.softmax(x, axis=1), axis=1),
    "rows, then columns": lambda x: jnp.max(jax.nn.softmax(x, axis=1), axis=0),
    "a sum with the same rows": lambda x: jnp.sum(jnp.exp(x) + x, axis=1),
    "a sum with the transpose": lambda x: jnp.sum(jnp.exp(x) + x.T, axis=1),
}
_TOGETHER, _ACROSS, _SAME, _TRANSPOSED = _PROGRAMS


def _cases() -> list[Case]:
    matrix = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    variants = {name: Variant(function=function) for name, function in _PROGRAMS.items()}
    return [Case(name="8192 × 8192 float32", arguments=(matrix,), variants=variants)]


def _conclude(result: StudyResult) -> Conclusion:
    (case,) = result.cases
    launches = {name: result.value(case, name, "launches") for name in _PROGRAMS}
    traffic = {name: result.value(case, name, "bytes") / 1e6 for name in _PROGRAMS}
    said = next((row.note for row in result.rows if row.variant == _ACROSS and row.note), "nothing")
    return Conclusion(
        sentences=(
            f"Two reductions over rows take {launches[_TOGETHER]:.0f} launch(es) and {traffic[_TOGETHER]:,.0f} MB; one "
            f"over rows and one over columns take {launches[_ACROSS]:.0f} and {traffic[_ACROSS]:,.0f} MB.",
            f"XLA's word on the edge between them: “{said}”.",
            f"A transposed operand of an elementwise sum alone does not: {launches[_TRANSPOSED]:.0f} launch(es) and "
            f"{traffic[_TRANSPOSED]:,.0f} MB where the plain one takes {launches[_SAME]:.0f} and "
            f"{traffic[_SAME]:,.0f} MB.",
        ),
        findings=(
            Finding(
                ours=f"{traffic[_ACROSS] / traffic[_TOGETHER]:.1f} × the bytes of two reductions over rows",
                verdict="holds" if traffic[_ACROSS] > 1.5 * traffic[_TOGETHER] else "does not hold",
                reason="A block that has whole rows has no whole column: the second reduction waits for all blocks.",
            ),
        ),
    )


STUDY = Study(
    name="incompatible",
    title="What cannot be joined",
    claims=(Claim("A row-wise reduction and a column-wise one do not fuse", "no figure", "Kernel Fusion"),),
    count=lambda target: count_variants(_cases(), target),
    conclude=_conclude,
    quantity=("bytes", "bytes"),
)
