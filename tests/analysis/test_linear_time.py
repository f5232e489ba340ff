"""The analysis takes twice as long for twice as many layers."""

from __future__ import annotations

import gc
import time
from pathlib import Path

from hlo_analysis import Capture, analyze
from hlo_analysis.changes import difference
from hlo_analysis.explain import edges_of
from tests.analysis.layers import LAUNCHES, write_layers
from xlafuse.catalogue import KERNELS


def _seconds(capture: Capture) -> float:
    """Of one core, to analyse a capture and to answer what the commands ask of it."""
    start = time.process_time()
    analysis = analyze(capture, catalogue=KERNELS)
    edges_of(analysis)
    difference(analysis, analysis)
    return time.process_time() - start


def test_twice_the_layers_take_twice_as_long(tmp_path: Path) -> None:
    captures = {layers: Capture.load(write_layers(tmp_path / str(layers), layers)) for layers in (32, 64)}
    analysis = analyze(captures[64], catalogue=KERNELS)
    assert len(analysis.launches) == 64 * LAUNCHES
    assert len(analysis.missed) >= 64
    assert len(analysis.decisions) >= 64 * LAUNCHES
    # Of the processor's time, in turns, the least of each, in more turns where these do not show it yet: what else runs
    # on the machine can only add to it.
    taken: dict[int, list[float]] = {32: [], 64: []}
    gc.collect()
    gc.disable()
    try:
        for _ in range(16):
            for layers, capture in captures.items():
                taken[layers].append(_seconds(capture))
            if min(taken[64]) < 2.6 * min(taken[32]):
                break
    finally:
        gc.enable()
    assert min(taken[64]) < 2.6 * min(taken[32]), taken
