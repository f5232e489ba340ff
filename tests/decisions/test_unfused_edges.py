"""Why launches stayed apart, on a module and a record of priority fusion written by hand."""

from __future__ import annotations

import pytest

from hlo_analysis.decisions import categories, decide
from hlo_analysis.hlo import parse_module

HLO = """HloModule m

%less (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %l = pred[] compare(%a, %b), direction=LT
}

ENTRY %main {
  %x = f32[8,64] parameter(0)
  %part = f32[8,32] slice(%x), slice={[0:8], [0:32]}
  %flat = f32[256] bitcast(%part)
  ROOT %sorted = f32[256] sort(%flat), dimensions={0}, to_apply=%less
}
"""
PRICED = 'fusion_steps { update_priority { producer_name: "part" consumer_names: "gone" us_fused: 2 us_unfused: 1 } }\n'


def test_what_takes_no_fusion_is_told_where_another_user_was_priced() -> None:
    """XLA looks at no user behind a bitcast: what it says of the other, which took the producer in, is not of this."""
    texts = dict.fromkeys(("final_hlo", "before_priority_fusion", "after_priority_fusion"), HLO)
    texts["priority_fusion_dump"] = PRICED + 'hlo_module_before_fusion: "HloModule m"'

    class Texts:
        def text(self, key: str) -> str | None:
            return texts.get(key)

    (decision,) = decide(Texts(), parse_module(HLO), {"part": 0, "sorted": 1})
    assert (decision.verdict, decision.category) == ("ineligible", categories.CONSUMER)
    assert decision.reason == "[sorted sorts, and takes no fusion]"


PRODUCT = """HloModule m

ENTRY %main {
  %x = bf16[64,64] parameter(0)
  %n = bf16[64,64] negate(%x)
  %p = bf16[64,64] custom-call(%n, %x, %x), custom_call_target="__cublas$lt$matmul", backend_config=CONFIG
  ROOT %t = bf16[64,64] tanh(%p)
}
"""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"beta":0,"epilogue":"DEFAULT"}', "p is a library call"),
        ('{"beta":0,"epilogue":"BIAS_GELU"}', "p is a library call with a bias and GELU in its epilogue"),
        ('{"beta":1,"epilogue":"DEFAULT"}', "p is a library call with the sum with another matrix in its epilogue"),
    ],
)
def test_what_a_library_took_is_told(config: str, words: str) -> None:
    class Texts:
        def text(self, key: str) -> str | None:
            return None

    decisions = decide(
        Texts(),
        parse_module(PRODUCT.replace("CONFIG", f'{{"gemm_backend_config":{config}}}')),
        {"n": 0, "p": 1, "t": 2},
    )
    apart = [decision for decision in decisions if decision.verdict != "fused"]
    assert {decision.reason for decision in apart} == {f"[{words}]"}
