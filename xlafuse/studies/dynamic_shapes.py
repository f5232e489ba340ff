"""Study of changing shapes: one compilation for each, or padding to buckets."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from xlafuse.studies.products import bf16, dot
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult
from xlafuse.studies.variants import Case, Variant, count_variants

_LENGTHS = (300, 700, 900, 1000)
_EACH, _PADDED = "its own shape", "padded to a power of two"


def _bucket(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return dot(jax.nn.gelu(dot(x, w)), w)


def _case(name: str, rows: int, variant: str) -> Case:
    arguments = (bf16(rows, 2048), bf16(2048, 2048))
    return Case(name=name, arguments=arguments, variants={variant: Variant(function=_layer)})


def _count(target: str) -> Iterator[Row | str]:
    yield from count_variants([_case(f"{n} tokens", n, _EACH) for n in _LENGTHS], target)
    buckets = sorted({_bucket(n) for n in _LENGTHS})
    padded = count_variants([_case(f"{b} tokens", b, _PADDED) for b in buckets], target)
    found = dict(zip(buckets, padded, strict=True))
    for length in _LENGTHS:
        if isinstance(row := found[_bucket(length)], Row):
            yield Row(case=f"{length} tokens", variant=_PADDED, values=row.values)


def _conclude(result: StudyResult) -> Conclusion:
    lengths = result.cases
    own = sum(result.value(case, _EACH, "compile_seconds") for case in lengths)
    seen = {result.value(case, _PADDED, "compile_seconds") for case in lengths}
    waste = [result.value(case, _PADDED, "flops") / result.value(case, _EACH, "flops") - 1 for case in lengths]
    return Conclusion(
        sentences=(
            f"{len(lengths)} lengths compile in {own:.1f} s, one program each; padded to powers of two they are "
            f"{len(seen)} programs in {sum(seen):.1f} s.",
            f"Padding adds {min(waste):.0%} to {max(waste):.0%} of arithmetic.",
            "A shape that nobody tuned takes the operation's own rule at once, so a new length costs no tuning.",
        ),
        findings=(
            Finding(
                ours=f"{own / len(lengths):.1f} s a new shape of a two-product layer, without a GPU",
                verdict="holds",
                reason="XLA has static shapes; a bucket trades compile time for padded arithmetic.",
            ),
        ),
    )


STUDY = Study(
    name="dynamic_shapes",
    title="Shapes that change",
    claims=(Claim("Each new shape compiles again; dynamic code is slower", "no figure", "Kernel Fusion"),),
    count=_count,
    conclude=_conclude,
    quantity=("compile_seconds", "s to compile"),
)
