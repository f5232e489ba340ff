"""Occupancy, against numbers worked out by hand from NVIDIA's rules."""

from __future__ import annotations

import pytest

from hlo_analysis.costs.occupancy import multiprocessor_limits, occupancy
from hlo_analysis.targets import load_target, target_names


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "expected"),
    [
        # 80 x 32 = 2560 registers a warp; 6 warps in each quarter of 16384: 24 warps, 3 blocks of 8.
        ("h200", 256, 80, 128, (24 / 64, "registers")),
        # 33 x 32 = 1056 registers, of which a warp gets 1280: 12 warps a quarter, 12 blocks of 4.
        ("h200", 128, 33, 0, (48 / 64, "registers")),
        # 3328 registers a warp: 4 warps a quarter, 16 in all, where 65536 / 3328 is 19.
        ("h200", 32, 104, 0, (16 / 64, "registers")),
        # 99 KiB and the driver's 1 KiB: two blocks of 228 KiB; by registers there would be three.
        ("h200", 128, 168, 99 << 10, (8 / 64, "shared memory")),
        # 6273 + 1024 bytes are given as 7424, of which 31 fit; of 7296 there are 32.
        ("h200", 64, 16, 6273, (62 / 64, "shared memory")),
        ("h200", 64, 16, 6272, (1.0, None)),
        # 24 warps a block: two of them are 48 of 64; so it is by registers, which do not matter then.
        ("h200", 768, 32, 0, (48 / 64, "threads")),
        # A warp a block, and 32 blocks.
        ("h200", 32, 16, 0, (32 / 64, "blocks")),
        # 33 threads take two warps.
        ("h200", 33, 16, 0, (1.0, None)),
        ("h200", 1024, 32, 8320, (1.0, None)),
        # 1536 threads and 16 blocks.
        ("a6000", 64, 32, 0, (32 / 48, "blocks")),
        ("a6000", 1024, 32, 0, (32 / 48, "threads")),
        # 164 KiB: three blocks of 48 + 1 KiB.
        ("a100", 256, 32, 48 << 10, (24 / 64, "shared memory")),
        # 24 blocks of two warps are all 48.
        ("rtx-pro-6000", 64, 32, 0, (1.0, None)),
        # More than a multiprocessor has.
        ("h200", 1024, 128, 0, (0.0, "registers")),
    ],
)
def test_occupancy_by_hand(
    target: str, threads: int, registers: int, shared: int, expected: tuple[float, str | None]
) -> None:
    limits = multiprocessor_limits(load_target(target).config_text)
    assert limits is not None
    found = occupancy(limits, block=(threads, 1, 1), registers=registers, shared_memory_bytes=shared)
    assert found == expected


def test_threads_of_a_block_are_those_of_all_its_dimensions() -> None:
    limits = multiprocessor_limits(load_target("h200").config_text)
    assert limits is not None
    assert occupancy(limits, block=(8, 4, 24), registers=16, shared_memory_bytes=0) == (48 / 64, "threads")


def test_every_shipped_gpu_has_limits_and_others_have_none() -> None:
    for name in target_names():
        assert (multiprocessor_limits(load_target(name).config_text) is None) == (name in ("cpu", "attached"))
    h200 = load_target("h200").config_text
    assert multiprocessor_limits(h200.replace("major: 9", "major: 99")) is None
    assert multiprocessor_limits(h200.replace("registers_per_core_limit", "other")) is None
    assert multiprocessor_limits(None) is None
