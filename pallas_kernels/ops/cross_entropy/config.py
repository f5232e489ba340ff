"""Launch configurations of the cross-entropy kernels: what may be chosen, and what is chosen untuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.primitives.rows import ACCESS_BYTES, WARPS

REGISTER_COLUMNS = 12288
"""The longest row that one warpgroup holds in its registers; 16384 float32 ones spill."""
_SHARED_MEMORY_BYTES = 227 * 1024
"""What one block of Hopper may have."""
_OTHER_BYTES = 4096
"""Of it for barriers, the exchange between warpgroups, and Mosaic GPU's own scratch."""
_WARP_LANES = 32
_MANY_ROWS = 1024
"""From here on one warpgroup a row should fill the device (8192 rows are measured); fewer share theirs among more."""
_MOST_HELD = 2
"""Chunks that a warpgroup keeps in registers: with 2, four warpgroups use the 128 that they have."""
_MOST_BARRIERS = 32
"""One a place, and Mosaic GPU has no more in a group."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the kernel of the loss cuts its work.

    loads: "registers" gives a row to one warpgroup, which reads it once; "ring" gives it to the `warpgroups` of a
        persistent block, which bring it to shared memory by TMA, `chunk_lines` lines at a time, into `slots` places
        each, and with a gradient keep `held` more chunks each in registers; "chunked" has one warpgroup walk along
        the row, `chunk` columns at a time (loss only).
    """

    loads: Literal["registers", "ring", "chunked"]
    warpgroups: int = 4
    chunk_lines: int = 16
    slots: int = 6
    held: int = 0
    chunk: int = 4096


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """How the kernel of the gradient alone cuts its work: one block of one warpgroup for `chunk` columns of a row."""

    chunk: int = 8192


def default_forward(rows: int, vocabulary: int, itemsize: int, *, with_gradient: bool) -> ForwardConfig:
    """The untuned choice for `rows` rows of `vocabulary` values of `itemsize` bytes."""
    if vocabulary <= REGISTER_COLUMNS:
        return ForwardConfig(loads="registers")
    # 8192 x 128256 bf16 on an H200: the loss alone takes 477 µs in chunks, 540 from the best ring.
    if not with_gradient and rows >= _MANY_ROWS:
        return ForwardConfig(loads="chunked")
    # With the gradient: 4 warpgroups that hold 2 chunks 1094 µs, 1 chunk 1138, none 1194; 3 that hold 2 take 1106.
    for warpgroups in (4, 3, 2):
        ring = ring_config(vocabulary, itemsize, warpgroups=warpgroups, chunk_bytes=8192, most_held=_MOST_HELD)
        if ring is not None:
            return ring
    return ForwardConfig(loads="chunked")


def line_length(vocabulary: int, itemsize: int) -> int | None:
    """Columns that one warp takes in one access a lane, the widest that divide a row; None for odd rows.

    A row of 128256 bf16 values is 501 lines of 256.
    """
    vector = ACCESS_BYTES // itemsize
    while vector * itemsize >= 4:
        if vocabulary % (_WARP_LANES * vector) == 0:
            return _WARP_LANES * vector
        vector //= 2
    return None


def ring_config(
    vocabulary: int, itemsize: int, *, warpgroups: int, chunk_bytes: int, most_held: int = 0
) -> ForwardConfig | None:
    """As many places as fit; None where the row does not divide into lines, or is too short for all warpgroups.

    What finds no place in a row stays in registers, up to `most_held` chunks of each warpgroup.
    """
    line = line_length(vocabulary, itemsize)
    if line is None:
        return None
    chunk_lines = chunk_bytes // (line * itemsize * WARPS) * WARPS
    if not chunk_lines or vocabulary // (line * chunk_lines) < warpgroups:
        return None
    places = (_SHARED_MEMORY_BYTES - _OTHER_BYTES) // (chunk_lines * line * itemsize)
    slots = min(places, _MOST_BARRIERS) // warpgroups
    if slots < 2:
        return None
    own = vocabulary // (line * chunk_lines) // warpgroups
    held = max(0, min(most_held, own + 1 - slots, own))
    return ForwardConfig(loads="ring", warpgroups=warpgroups, chunk_lines=chunk_lines, slots=slots, held=held)


def forward_candidates(vocabulary: int, itemsize: int, *, with_gradient: bool) -> dict[str, ForwardConfig]:
    """The configurations worth measuring, by name."""
    candidates = {}
    if vocabulary <= REGISTER_COLUMNS:
        candidates["registers"] = ForwardConfig(loads="registers")
    for warpgroups, kilobytes in ((4, 8), (4, 12), (3, 8)):
        config = ring_config(vocabulary, itemsize, warpgroups=warpgroups, chunk_bytes=kilobytes * 1024)
        if config is not None:
            candidates[f"ring {warpgroups} warpgroups {config.slots} x {kilobytes} KiB"] = config
    for warpgroups, most_held in ((4, 2), (3, 2), (4, 1)) if with_gradient else ():
        config = ring_config(vocabulary, itemsize, warpgroups=warpgroups, chunk_bytes=8192, most_held=most_held)
        if config is not None and config.held == most_held:
            candidates[f"ring {warpgroups} warpgroups {config.slots} x 8 KiB, {config.held} held"] = config
    if not with_gradient and vocabulary > 4096:
        candidates["chunk 4096"] = ForwardConfig(loads="chunked")
    return candidates
