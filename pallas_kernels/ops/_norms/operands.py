"""The operands and results of the backward kernels, by the names of a kernel's references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops._norms.config import BackwardConfig
from pallas_kernels.ops._norms.norm import COMPILER_PARAMS, Norm
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.sharing import without_values


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("streams", "scale", "words"),
    meta_fields=("norm", "sums", "blocks", "config"),
)
@dataclass(frozen=True, kw_only=True)
class BackwardOperands:
    """One call of a backward kernel.

    streams: the normalised rows, dy and, with a residual, the sum's cotangent; each (rows, features).
    scale: (features,) or None. words: the dropout's key, (2,), or None.
    sums: the dtypes of the gradients that are summed over rows, by name ("scale", "bias").
    """

    norm: Norm
    streams: tuple[jax.Array, ...]
    scale: jax.Array | None
    words: jax.Array | None
    sums: dict[str, Any]
    blocks: int
    config: BackwardConfig

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.streams[0].shape[0]

    @property
    def features(self) -> int:
        """The length of a row."""
        return self.streams[0].shape[1]

    @property
    def dtype(self) -> Any:
        """The dtype of the streams and of the rows written."""
        return self.streams[0].dtype

    @property
    def kernel_name(self) -> str:
        """The kernel's name in traces and HLO."""
        has_dropout = self.words is not None
        return self.norm.kernel_name(has_residual=False, has_dropout=has_dropout) + "_gradient"

    @property
    def inputs(self) -> dict[str, jax.Array]:
        """The kernel's operands, by name."""
        named = dict(zip(("total", "dy", "dtotal_in"), self.streams, strict=False))
        named |= {} if self.scale is None else {"scale": self.scale}
        return named | ({} if self.words is None else {"words": self.words})

    def out_types(self, parts: tuple[int, ...] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The kernel's outputs, by name; `parts` is the shape of a row in that kernel.

        A single block writes its column sums in the gradients' shape and dtype; several blocks write one float32 array
        (blocks, sums, ...).
        """
        columns = parts or (self.features,)
        row = jax.ShapeDtypeStruct((self.rows, *columns), self.dtype)
        named = {"dtotal": row} | ({} if self.words is None else {"dx": row})
        if self.blocks == 1:
            return named | {"d" + name: jax.ShapeDtypeStruct((1, *columns), dtype) for name, dtype in self.sums.items()}
        if self.sums:
            named["sums"] = jax.ShapeDtypeStruct((self.blocks, len(self.sums), *columns), jnp.float32)
        return named

    def sums_at(self, refs: dict[str, Any], block, name: str) -> Any:
        """Returns the reference of one block's column sums for the gradient called `name`."""
        return refs["d" + name].at[0] if self.blocks == 1 else refs["sums"].at[block, tuple(self.sums).index(name)]


def launch_blocks(
    operands: BackwardOperands,
    rows_of_block: Callable[[BackwardOperands, dict[str, Any]], None],
    scratch: dict[str, Any],
) -> dict[str, jax.Array]:
    """Runs a kernel with blocks of one warpgroup; returns the gradients' rows and each block's column sums, by name.

    rows_of_block: the kernel's body, a function of the operands without values and of all references, by name.
    """
    inputs, out_types, known = operands.inputs, operands.out_types(), without_values(operands)
    names = (*inputs, *out_types, *scratch)

    def kernel(*refs):
        rows_of_block(known, dict(zip(names, refs, strict=True)))

    outputs = settings.kernel(
        kernel,
        out_type=tuple(out_types.values()),
        grid=(operands.blocks,),
        grid_names=("block",),
        scratch_types=tuple(scratch.values()),
        compiler_params=COMPILER_PARAMS,
        kernel_name=operands.kernel_name,
    )(*inputs.values())
    return dict(zip(out_types, outputs, strict=True))
