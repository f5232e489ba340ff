"""The block compiled for an H200: a replayed autotuning gives the kernels that the H200 was given when it was recorded,
and ours save launches and traffic.

`data/h200_launches.json` is what `scripts/record_autotune.py` wrote on the H200 beside the recording that ships with
the target: kinds of launches per case, counted on the real GPU's executable.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jaxlib
import pytest

from hlo_analysis import Analysis, Capture, analyze
from hlo_analysis.capture import capture
from hlo_analysis.hlo import parse_module
from hlo_analysis.program.launch_kinds import kind_of
from hlo_analysis.program.launch_sites import find_launches
from xlafuse.models import block_function
from xlafuse.strategies import get_strategy

LAUNCHES = Path(__file__).parent / "data" / "h200_launches.json"
if not LAUNCHES.exists():
    pytest.skip("no recording of an H200's launches yet", allow_module_level=True)
RECORDED = json.loads(LAUNCHES.read_text())
CASES = {
    f"{case['preset']}-{case['strategy']}-{case['mode']}-{'x'.join(map(str, case['shape']))}": case
    for case in RECORDED["cases"]
}
PRODUCTS = {"cublas", "cublaslt", "triton_gemm"}

REPLAYED = (
    "llama3-8b-xla-forward-1x1",
    "gpt2-medium-pallas-forward-2x1024",
    "llama3-8b-xla-grad-2x4096",
    "llama3-8b-best-forward-1x512",
)
"""Cases of each preset, mode and kind of strategy; the first is quick to compile, the second a block without rotations.
Not gradients by our kernels: their programs have changed since."""


def test_the_shipped_block_was_recorded_on_an_h200():
    assert "H200" in RECORDED["device"]["name"]
    for mode in ("forward", "grad"):
        for shape in ("2x4096", "1x512", "1x1"):
            assert CASES[f"llama3-8b-xla-{mode}-{shape}"]["gemm_choice"] == "attached"


@functools.cache
def compiled(preset: str, strategy: str, mode: str, shape: tuple[int, int]) -> Capture:
    """The block under a strategy; which takes seconds, for all tests that look at it."""
    chosen = get_strategy(strategy)
    function, arguments = block_function(preset, shape, plan=chosen.plan)
    return capture(function, *arguments, target="h200", mode=mode, compiler_options=chosen.compiler_options)


def analyzed(strategies: list[str], mode: str, shape: tuple[int, int]) -> dict[str, Analysis]:
    """What becomes of llama3-8b's block, by strategy."""
    return {name: analyze(compiled("llama3-8b", name, mode, shape)) for name in strategies}


@pytest.mark.parametrize(
    "name",
    [
        REPLAYED[0],
        pytest.param(REPLAYED[1], marks=pytest.mark.slow),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.drawn(1 / 2)]) for name in REPLAYED[2:]),
    ],
)
def test_replay_launches_what_the_h200_launched(name):
    case = CASES[name]
    if case["versions"]["jaxlib"] != jaxlib.__version__:
        pytest.skip("XLA takes no recording of another version")
    captured = compiled(case["preset"], case["strategy"], case["mode"], tuple(case["shape"]))
    module = parse_module(captured.text("final_hlo"))
    table = find_launches(module, captured.text("thunk_sequence"), captured.text("thunk_metadata"))
    kinds = Counter()
    for site in table.sites:
        kinds[kind_of(module, site.instruction, site.thunk.kind)] += site.repeat
    provenance = captured.manifest.provenance
    # Where all products are in kernels of ours, there is none to choose.
    assert provenance.gemm_choice == ("replayed" if PRODUCTS & kinds.keys() else "none")
    assert provenance.autotune_hits == provenance.autotune_lookups
    assert dict(kinds) == case["kinds"]


def assert_kernels_save_launches_and_traffic(made: Mapping[str, Analysis]) -> None:
    for kernels, plain in (("pallas", "xla"), ("pallas_cudnn", "xla_cudnn")):
        assert made[kernels].launch_count < made[plain].launch_count
        assert made[kernels].traffic.bytes < made[plain].traffic.bytes
        assert made[kernels].roofline_us < made[plain].roofline_us
    # Our kernels' products are stated by the operations, cuDNN's and cuBLAS's are known to XLA.
    assert made["pallas"].traffic.flops == pytest.approx(made["xla_cudnn"].traffic.flops, rel=0.001)
    # Nothing is moved to suit a kernel: neither slices of a joined product nor another order of axes.
    moves = {"slice", "concatenate", "transpose", "copy", "bitcast", "reshape"}
    assert [
        launch.name
        for launch in made["pallas_cudnn"].launches
        if launch.opcodes and {opcode for opcode, _ in launch.opcodes} <= moves
    ] == []


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
def test_gradients_by_kernels_save_launches_and_traffic():  # test_compare.py has the forward pass
    made = analyzed(["xla", "pallas", "xla_cudnn", "pallas_cudnn"], "grad", (2, 4096))
    assert_kernels_save_launches_and_traffic(made)


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_one_token_has_its_kernels(mode):
    made = analyzed(["xla", "pallas"], mode, (1, 1))
    assert made["pallas"].launches_by_kind["mosaic"] == {"forward": 5, "grad": 12}[mode]
    assert made["pallas"].traffic.bytes < made["xla"].traffic.bytes
    # In the gradient of one token, XLA pads four arrays for the kernels: two cotangents, cosines and sines.
    more = {"forward": 0, "grad": 5}[mode]
    assert made["pallas"].launch_count < made["xla"].launch_count + more
