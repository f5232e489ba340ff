"""A replayed autotuning gives the kernels that the H200 was given when it was recorded.

`data/h200_launches.json` is what `scripts/record_autotune.py` wrote on the H200 beside the recording that ships with
the target: kinds of launches per case, counted on the real GPU's executable.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hlo_analysis.capture import capture
from hlo_analysis.hlo import parse_module
from hlo_analysis.kinds import kind_of
from hlo_analysis.launches import find_launches
from xlafuse.models import block_function, get_preset
from xlafuse.strategies import get_strategy

LAUNCHES = Path(__file__).parent / "data" / "h200_launches.json"
if not LAUNCHES.exists():
    pytest.skip("no recording of an H200's launches yet", allow_module_level=True)
RECORDED = json.loads(LAUNCHES.read_text())
CASES = {
    f"{case['preset']}-{case['strategy']}-{case['mode']}-{'x'.join(map(str, case['shape']))}": case
    for case in RECORDED["cases"]
}
# Recorded when the sums of bias_activation's gradient were XLA's reduction; since then they are a kernel of our own.
# Strict: goes when the case is recorded anew.
STALE = {"gpt2-medium-pallas-grad-2x1024": "recorded before bias_gradient was a kernel of ours: one reduction more"}

# One that is quick to compile stands for all where time is short.
QUICK = "llama3-8b-xla-forward-1x1"


def test_the_shipped_block_was_recorded_on_an_h200():
    assert "H200" in RECORDED["device"]["name"]
    for mode in ("forward", "grad"):
        for shape in ("2x4096", "1x512", "1x1"):
            assert CASES[f"llama3-8b-xla-{mode}-{shape}"]["gemm_choice"] == "attached"


def _marks(name: str) -> list[pytest.MarkDecorator]:
    marks = [] if name == QUICK else [pytest.mark.slow]
    return [*marks, pytest.mark.xfail(strict=True, reason=STALE[name])] if name in STALE else marks


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in CASES])
def test_replay_launches_what_the_h200_launched(name):
    case = CASES[name]
    strategy = get_strategy(case["strategy"])
    plan = strategy.plan.applicable(get_preset(case["preset"]))
    function, arguments = block_function(case["preset"], tuple(case["shape"]), plan=plan)
    captured = capture(
        function, *arguments, target="h200", mode=case["mode"], compiler_options=strategy.compiler_options
    )
    module = parse_module(captured.text("final_hlo"))
    table = find_launches(module, captured.text("thunk_sequence"), captured.text("thunk_metadata"))
    kinds = Counter()
    for site in table.sites:
        kinds[kind_of(module, site.instruction, site.thunk.kind)] += site.repeat
    provenance = captured.manifest.provenance
    assert provenance.gemm_choice == "replayed"
    assert provenance.autotune_hits == provenance.autotune_lookups
    assert dict(kinds) == case["kinds"]
