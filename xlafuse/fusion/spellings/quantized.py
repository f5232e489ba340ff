"""Dequantized weights; `combine` makes `quantized_linear` of them and a product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.quantized_linear.weight import GROUP_SIZES
from xlafuse.fusion.graph import Value, before
from xlafuse.fusion.spelling import Proposal, Spelling, is_narrow
from xlafuse.fusion.terms import BY_ELEMENT

_REACH = 40


def _dequantized(
    values: jax.Array, scales: jax.Array, *, group_size: int | None, dtype: Any, narrow: bool = False
) -> jax.Array:
    """Multiplies int8 (features, outputs) by scales (groups, outputs), in `dtype` where narrow, else in float32."""
    features, outputs = values.shape
    groups = scales.shape[0]
    more = dtype if narrow else scales.dtype
    wide = values.astype(more).reshape(groups, features // groups, outputs) * scales[:, None, :].astype(more)
    return wide.reshape(features, outputs).astype(dtype)


@lru_cache(maxsize=4096)
def _has_bytes(value: Value) -> bool:
    """Returns whether a value is computed from numbers of 8 bits or fewer, so that patterns are traced for it."""
    return any(each.dtype.itemsize == 1 and each.dtype != jnp.bool_ for each in before(value, BY_ELEMENT, _REACH))


def _weights(value: Value, *, scales_in: Any) -> Iterator[Proposal]:
    if len(value.shape) != 2 or not is_narrow(value) or not _has_bytes(value):
        return
    for order in ((0, 1), (1, 0)):
        features, outputs = (value.shape[axis] for axis in order)
        for group in (None, *GROUP_SIZES):
            if features % (group or 1) or group == features:
                continue
            arrays = {
                "values": jax.ShapeDtypeStruct((features, outputs), jnp.int8),
                "scales": jax.ShapeDtypeStruct((features // group if group else 1, outputs), scales_in or value.dtype),
            }
            static = {"group_size": group, "dtype": value.dtype}
            yield Proposal(arrays=arrays, order=order, static=static)


def _spellings() -> Iterator[Spelling]:
    for narrow, scales_in in ((False, jnp.float32), (True, jnp.float32), (True, None)):
        yield Spelling(
            operation="dequantized",
            function=partial(_dequantized, narrow=narrow),
            propose=partial(_weights, scales_in=scales_in),
            roots=frozenset(("mul", "convert_element_type", "reshape", "transpose")),
            arguments=lambda given: {"group_size": given["group_size"]},
        )


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
