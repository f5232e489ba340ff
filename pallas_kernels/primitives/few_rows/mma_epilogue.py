"""The epilogue of `mma_kernel`'s products: a norm's factor, bias and epilogue, or the rotation of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.heads import Rotation
from pallas_kernels.primitives.few_rows.mma_products import Share
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.thread_values import Values


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The operands of a block that are loaded before its products.

    biases: of the block's columns, or of both halves of a head. residuals, angles: for each turn of the threads.
    """

    biases: Sequence[jax.Array | None]
    residuals: Sequence[jax.Array | None]
    angles: Sequence[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class MmaEpilogue:
    """The epilogue of a block.

    widths: columns of the weights side by side. ends: for each of them, the number of the block after its last.

    The methods' extras are the operands given: bias (of all columns), residual, and the arrays of `norm` and
    `rotation`.
    """

    share: Share
    epilogue: Epilogue
    norm: RowNorm
    rotation: Rotation | None
    features: int
    widths: Sequence[int]
    ends: Sequence[int]

    def begin(self, extras: Mapping[str, Any]) -> Ready:
        """Loads bias, residual and angles before the products, while operands are being copied."""
        block, values = lax.axis_index("block"), self._values
        first = block * self.share.columns
        starts = [first + i * values.columns for i in range(self._halves)]
        places = [pl.ds(start, values.columns) for start in starts]
        angles = []
        if self.rotation is not None:
            tables = [values.of_columns(extras[name]) for name in ("whole", "fraction")]
            angles = [self.rotation.angles(values.of_rows(extras["positions"], turn), *tables) for turn in values.turns]
        return Ready(
            biases=[values.of_columns(extras["bias"].at[place]) if "bias" in extras else None for place in places],
            residuals=[
                values.load(extras["residual"].at[:, places[0]], turn, self.widths[0]) if "residual" in extras else None
                for turn in values.turns
            ],
            angles=angles,
        )

    def finish(self, ready: Ready, sums: Mapping[str, Any], outs: Sequence[Any]) -> None:
        """Computes and stores the block's results.

        sums: products and squares in shared memory. outs: one or more outputs for each of `widths`.
        """
        values = self._values
        for number, turn in enumerate(values.turns):
            squares = values.squares(sums["squares"], turn)
            scale = lax.rsqrt(squares * (1.0 / self.features) + self.norm.epsilon)
            products = [values.sums(sums["products"], turn, i * values.columns) for i in range(self._halves)]
            if self.rotation is None:
                results = self.epilogue.apply(
                    products,
                    scale=scale,
                    bias=ready.biases[0],
                    residual=ready.residuals[number],
                    dtype=outs[0].dtype,
                )
                self._store([results] * len(self.widths), outs, turn)
            else:
                plain = [
                    self.epilogue.apply([product], scale=scale, bias=bias, residual=None, dtype=outs[0].dtype)[0]
                    for product, bias in zip(products, ready.biases, strict=True)
                ]
                cosine, sine = ready.angles[number]
                first, second = plain
                rotated = (first * cosine - second * sine, second * cosine + first * sine)
                self._store([rotated] * (len(self.widths) - 1) + [plain], outs, turn)

    def _store(self, results: Sequence[Sequence[jax.Array]], outs: Sequence[Any], turn: int) -> None:
        """Stores the results of the weight that owns this block: both halves of one result, or several results."""
        block, count = lax.axis_index("block"), len(outs) // len(self.widths)
        for i, (width, first, end) in enumerate(zip(self.widths, (0, *self.ends[:-1]), self.ends, strict=True)):

            def store(i=i, width=width, first=first):
                column = (block - first) * self.share.columns
                for number, value in enumerate(results[i]):
                    half, out = (number, i) if self.rotation is not None else (0, i * count + number)
                    place = pl.ds(column + half * self._values.columns, self._values.columns)
                    self._values.store(value, outs[out].at[:, place], turn, width)

            store() if len(self.widths) == 1 else pl.when((block >= first) & (block < end))(store)

    @property
    def _halves(self) -> int:
        return 1 if self.rotation is None else 2

    @property
    def _values(self) -> Values:
        share = self.share
        columns = share.columns // self._halves
        return Values(rows=share.rows, warps=share.warps, columns=columns, pitch=share.pitch, sum_rows=share.rows)


def interpreted(
    end: MmaEpilogue, x: Any, weights: Sequence[Any], extras: Mapping[str, Any], outs: Sequence[Any]
) -> None:
    """Computes the whole block without inline PTX, which the interpreter does not support."""
    block, columns = lax.axis_index("block"), end.share.columns
    for i, (w, first, last) in enumerate(zip(weights, (0, *end.ends[:-1]), end.ends, strict=True)):

        @pl.when((lax.axis_index("warpgroup") == 0) & (block >= first) & (block < last))
        def _(i=i, w=w, first=first):
            values = x[...][: end.share.rows].astype(jnp.float32)
            scale = lax.rsqrt(jnp.mean(values * values, axis=1, keepdims=True) + end.norm.epsilon)
            if end.share.is_scaled:
                values = values * extras["scale"][...].reshape(-1).astype(jnp.float32)
                values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
            own = pl.ds((block - first) * columns, columns)
            results = end.epilogue.apply(
                [jnp.dot(values, w[:, own].astype(jnp.float32))],
                scale=scale,
                bias=extras["bias"][pl.ds(block * columns, columns)].astype(jnp.float32) if "bias" in extras else None,
                residual=extras["residual"][:, own].astype(jnp.float32) if "residual" in extras else None,
                dtype=outs[0].dtype,
            )
            if end.rotation is not None and i + 1 < len(weights):
                tables = (extras[name][...][None] for name in ("whole", "fraction"))
                cosine, sine = end.rotation.angles(extras["positions"][...][:, None], *tables)
                one, other = jnp.split(results[0], 2, axis=1)
                results = (jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine], axis=1),)
            for number, result in enumerate(results):
                out = outs[i * len(results) + number]
                out[:, own] = result.astype(out.dtype)
