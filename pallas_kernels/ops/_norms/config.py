"""Launch configurations of the norms: what may be chosen, and what is chosen untuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.primitives.rows import ACCESS_BYTES, LANES, split_warp_row

SHARED_MEMORY_BYTES = 228 * 1024
"""What a streaming multiprocessor of Hopper gives to its blocks."""
BLOCK_RESERVED_BYTES = 1024
"""What the driver keeps of it for each block."""
LONGEST_WHOLE_ROW = 8192
"""The longest row whose backward pass fits in the registers of one warpgroup."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel cuts its work: one block a row.

    holds: where the row is between its passes: in "registers" as float32, "packed" in registers as its own 16 bits
        (half as many; of one warpgroup, and no chunks), or, brought there by TMA, in "shared" memory.
    warpgroups: that share a row, each warp a line of it; then only `holds` and `piece` count.
    register_columns: the longest row held in registers (206 of them a thread at 16384 bf16 columns).
    chunk: columns in registers at a time in a longer row, which is read again from the L2 cache.
    piece: accesses a thread whose scale and bias are in registers at once; 0 for the whole row's.
    """

    holds: Literal["registers", "packed", "shared"] = "registers"
    warpgroups: int = 1
    register_columns: int = 16384
    chunk: int = 4096
    piece: int = 0


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """How the backward kernel cuts its work: persistent blocks, each taking every n-th row.

    loads: "shared" brings rows to shared memory by TMA, `steps` of them in flight, for `warpgroups` that share each
        row; "pipeline" does so for a block of one warpgroup and rows of any length; "direct" reads rows into registers;
        "chunked" walks along each row several times, `chunk` columns at a time.
    blocks_per_core: blocks a streaming multiprocessor. Each writes one row of partial column sums.
    second_read: where the second pass over a row finds it: kept in registers as float32 ("float32"; fewer instructions,
        and its place in shared memory is free sooner), or read again from shared memory or the L1 cache ("reload"; one
        warpgroup then needs 168 registers instead of 202 at 4096 bf16 columns, and does not spill at 8192), or that
        after the first pass over the row behind it ("overlapped"; "shared" alone).
    gain: where the scale lives between rows.
    """

    loads: Literal["shared", "pipeline", "direct", "chunked"] = "pipeline"
    blocks_per_core: int = 3
    warpgroups: int = 1
    steps: int = 3
    second_read: Literal["float32", "reload", "overlapped"] = "reload"
    gain: Literal["registers", "shared"] = "shared"
    chunk: int = 2048


@dataclass(frozen=True, kw_only=True)
class BackwardShape:
    """What a backward configuration depends on.

    streams: arrays read row by row (x, dy, and the sum's cotangent where there is one).
    gain_bytes: of one value of the scale; 0 without a scale.
    sums: gradients summed over columns (scale, bias).
    has_dropout: whether the gradient of what was dropped out is written, too.
    centered: whether rows lose their mean.
    """

    features: int
    itemsize: int
    streams: int
    gain_bytes: int
    sums: int = 1
    has_dropout: bool = False
    centered: bool = False

    def shared(
        self,
        *,
        warpgroups: int,
        blocks_per_core: int,
        second_read: Literal["float32", "reload", "overlapped"] | None = None,
        most_steps: int | None = None,
    ) -> BackwardConfig | None:
        """Rows in shared memory for several warpgroups, as many in flight, up to `most_steps`, as fit.

        None where fewer than 2 (4) fit, or the row does not divide over the warpgroups, or would spill.
        """
        if split_warp_row(self.features, self.itemsize, warpgroups=warpgroups) is None:
            return None
        columns = self.features // (warpgroups * LANES)  # a thread
        # Four warpgroups have 128 registers a thread, where two kinds of sums, or a mask, take 16 columns.
        most_columns = 16 if warpgroups == 4 and (self.sums > 1 or self.has_dropout) else 32
        if columns > most_columns or (second_read == "float32" and columns > 16) or warpgroups * blocks_per_core > 12:
            return None
        is_overlapped = second_read == "overlapped"
        # Reading again is as quick or quicker (dropout and RMSNorm at 32768 x 4096 bf16: 322 µs, kept 353) but for 8192
        # bf16 columns, of which more than two rows under way are too many: LayerNorm at 8192 rows 102 µs, 4 steps
        # 113 µs, RMSNorm 102 and 112 µs; of three streams 137 µs, read again 141 µs, and 130 and 136 µs.
        keeps_row = warpgroups == 4 and self._keeps_long_rows
        most = most_steps or (6 if is_overlapped else 2 if keeps_row and second_read is None else 4)
        steps = self._steps(blocks_per_core, self.features * self.gain_bytes + 3072, most=most)
        if steps < (4 if is_overlapped else 2):
            return None
        return BackwardConfig(
            loads="shared",
            warpgroups=warpgroups,
            blocks_per_core=blocks_per_core,
            steps=steps,
            second_read=second_read or ("float32" if keeps_row else "reload"),
        )

    def pipeline(self, *, blocks_per_core: int) -> BackwardConfig | None:
        """The same for one warpgroup and rows that need not divide evenly."""
        if self.features * self.itemsize % ACCESS_BYTES or self.features * self.sums > LONGEST_WHOLE_ROW:
            return None  # TMA's alignment; registers
        # Sums over a warpgroup take 2 KiB of scratch, the barriers' page another one.
        steps = self._steps(blocks_per_core, self.features * self.gain_bytes + 4096)
        return BackwardConfig(loads="pipeline", blocks_per_core=blocks_per_core, steps=steps) if steps >= 2 else None

    def _default_with_dropout(self) -> BackwardConfig | None:
        """What was measured to be faster where one more array is written."""
        if self.itemsize != 2:
            return None
        if self.features == 8192 and not self.centered:  # at 8192 rows 171 µs, the rows one after the other 187 µs
            return self.shared(warpgroups=4, blocks_per_core=1, second_read="overlapped")
        if self.features == 4096:  # at 32768 rows 330 µs, with more rows under way 349 µs; LayerNorm 335 and 345 µs
            return self.shared(warpgroups=2, blocks_per_core=2, second_read="reload", most_steps=2)
        return None

    def default(self) -> BackwardConfig:
        """The untuned choice."""
        measured = self._default_with_dropout() if self.has_dropout else None
        if measured is not None:
            return measured
        # RMSNorm on an H200 at 32768 x 4096 bf16: 4 warpgroups and 1 block 251 µs, pipelines of 3 blocks 253 µs,
        # direct loads 327 µs. Fewer warpgroups where four would not have 16 bytes of a row for each thread.
        per_warpgroup = 128 * ACCESS_BYTES // self.itemsize
        # LayerNorm joins four sums of each line, which 16 warps do slower than 8: 290 µs; 2 warpgroups and 1 block
        # 257 µs, 2 blocks 271 µs; without a residual 2 warpgroups and 2 blocks 201 µs, 4 warpgroups 214 µs and more.
        most = 2 if self.centered and self.features <= 4096 else 4
        warpgroups = max((w for w in (4, 2, 1) if w <= most and self.features % (w * per_warpgroup) == 0), default=0)
        if warpgroups:
            # Two streams leave time that a second block fills, where rows are not kept.
            four = (2, 1) if self.streams == 2 and not self.centered and not self._keeps_long_rows else (1,)
            two = (1,) if self.centered and self.streams == 3 and self.features > 2048 else (2, 1)
            blocks = {4: four, 2: two, 1: (6, 4, 3, 2, 1)}[warpgroups]
            configs = (self.shared(warpgroups=warpgroups, blocks_per_core=b) for b in blocks)
        else:
            configs = (self.pipeline(blocks_per_core=b) for b in (3, 2, 1))
        config = next((config for config in configs if config is not None), None)
        if config is not None:
            return config
        if self.features * max(1, self.sums) <= LONGEST_WHOLE_ROW:
            return BackwardConfig(loads="direct", blocks_per_core=3 if self.features <= 4096 else 2)
        return BackwardConfig(loads="chunked", blocks_per_core=4)

    def candidates(self) -> dict[str, BackwardConfig]:
        """The configurations worth measuring, by name."""
        if self.features <= 2048:
            pairs, overlapped, blocks = ((1, 4), (1, 8), (2, 2), (4, 2)), ((1, 4),), (8,)
        else:
            pairs, overlapped, blocks = ((4, 1), (4, 2), (2, 2)), ((4, 1), (2, 2)), (3,)
        configs = [
            self.shared(warpgroups=w, blocks_per_core=b, second_read=second_read, most_steps=steps)
            for w, b in pairs
            for second_read in ("reload", "float32")
            for steps in (2, 4)
        ]
        configs += [self.shared(warpgroups=w, blocks_per_core=b, second_read="overlapped") for w, b in overlapped]
        configs += [self.pipeline(blocks_per_core=b) for b in blocks]
        if not any(configs):
            configs += [BackwardConfig(loads="chunked", chunk=c, blocks_per_core=b) for c, b in ((1024, 6), (2048, 4))]
        return {_name(config): config for config in configs if config is not None}

    @property
    def _keeps_long_rows(self) -> bool:
        return not self.has_dropout and self.itemsize == 2 and self.features == 8192

    def _steps(self, blocks_per_core: int, other_bytes: int, *, most: int = 4) -> int:
        budget = SHARED_MEMORY_BYTES // blocks_per_core - BLOCK_RESERVED_BYTES - other_bytes
        return min(most, budget // (self.streams * self.features * self.itemsize))


FEW_ROWS = 512
"""Below, a row should not wait for TMA."""


def default_forward(
    rows: int,
    features: int,
    itemsize: int,
    *,
    is_centered: bool = False,
    has_residual: bool = False,
    has_dropout: bool = False,
) -> ForwardConfig:
    """The untuned choice for rows of `features` values of `itemsize` bytes."""
    if itemsize == 2 and has_dropout and (features == 4096 or (features == 8192 and not is_centered)):
        # Dropout and RMSNorm at 32768 x 4096 bf16: 1 warpgroup 258 µs, 2 warpgroups 254 µs.
        return ForwardConfig(warpgroups=2)
    if itemsize == 2 and is_centered and 4096 < features <= 8192:
        # LayerNorm at 8192 x 8192 bf16: 167 registers and 71.4 µs, in pieces 127 and 66.5 µs.
        return ForwardConfig(piece=4)
    if itemsize == 2 and is_centered and not has_residual and 2048 < features <= 4096:
        # LayerNorm at 32768 x 4096 bf16: 130.2 µs, in pieces 126.8 µs.
        return ForwardConfig(piece=2)
    if itemsize == 2 and has_residual and not is_centered and features == 4096 and rows >= FEW_ROWS:
        # RMSNorm at 32768 x 4096 bf16 with a residual: 258.6 and 258.9 µs, so 256.8 and 255.2 µs.
        return ForwardConfig(holds="shared", warpgroups=4, piece=1)
    if itemsize == 2 and not has_residual and not is_centered and features in (4096, 8192) and rows >= FEW_ROWS:
        # RMSNorm at 32768 x 4096 bf16: 130.4 µs, packed 129.6 µs; at 8192 x 8192 66.2 and 65.9 µs.
        return ForwardConfig(holds="packed", piece=features // 2048)
    return ForwardConfig()


def forward_candidates(features: int, itemsize: int) -> dict[str, ForwardConfig]:
    """The configurations worth measuring, by name."""
    candidates = {"registers": ForwardConfig(register_columns=features)} if features <= 16384 else {}
    for piece in (2, 4):
        candidates[f"pieces of {piece}"] = ForwardConfig(register_columns=features, piece=piece)
    for piece in (2, 4) if itemsize == 2 else ():
        config = ForwardConfig(holds="packed", register_columns=features, piece=piece)
        candidates[f"packed, pieces of {piece}"] = config
    for warpgroups in (1, 2, 4):
        if features >= 2048 * warpgroups and split_warp_row(features, itemsize, warpgroups=warpgroups):
            name = f"{warpgroups} warpgroups"
            for piece in (0, 1) if warpgroups > 1 else ():
                candidates[f"{name}, pieces of {piece}"] = ForwardConfig(warpgroups=warpgroups, piece=piece)
            for piece in (1, 2) if warpgroups < 4 else (1,):
                config = ForwardConfig(holds="shared", warpgroups=warpgroups, piece=piece)
                candidates[f"{name}, shared, pieces of {piece}"] = config
    for chunk in (2048, 4096, 8192):
        if features > 2 * chunk:
            candidates[f"chunk {chunk}"] = ForwardConfig(register_columns=chunk, chunk=chunk)
    return candidates


def _name(config: BackwardConfig) -> str:
    detail = {
        "direct": "",
        "chunked": f" {config.chunk}",
        "pipeline": f" {config.steps} steps",
        "shared": f" {config.warpgroups} warpgroups {config.steps} steps {config.second_read}",
    }[config.loads]
    return f"{config.loads}{detail}, {config.blocks_per_core} blocks"
