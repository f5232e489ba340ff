"""The reader of XLA's fusion dump: what it reads, and that it refuses what was cut off or damaged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_analysis import Capture, DumpError
from hlo_analysis.decisions.dump import Fused, Priced, Refused, read_fusion_dump

DUMP = r"""fusion_steps {
  update_priority {
    producer_name: "exp.0"
    consumer_names: "add.0"
    consumer_names: "mul \"q\"\n"
    us_fused: 1.25
    us_unfused: -3e-2
  }
}
fusion_steps {
  producer_ineligible {
    producer_name: "dot.1"
    reason: "not fusing because there are only bitcast users"
  }
}
fusion_steps {
  fusion {
    fusion_name: "fusion.1"
    producer_name: "exp.0"
    consumer_name: "add.0"
  }
}
fusion_steps { a_step_of_a_later_version { producer_name: "x" depth { level: 3 } } }
gpu_device_info {
  threads_per_block_limit: 1024
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
hlo_module_before_fusion: "HloModule m\n\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\n"
"""


def test_reads_steps_in_order_with_escapes_and_skips_what_it_does_not_know() -> None:
    dump = read_fusion_dump(DUMP)
    assert dump.steps == (
        Priced(producer="exp.0", us_fused=1.25, us_unfused=-0.03),
        Refused(producer="dot.1", reason="not fusing because there are only bitcast users"),
        Fused(fusion="fusion.1", producer="exp.0", consumer="add.0"),
    )
    assert dump.module_text == "HloModule m\n\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\n"


def test_a_default_that_text_protos_leave_out() -> None:
    text = (
        'fusion_steps { update_priority { producer_name: "a" us_fused: 2 } }\nhlo_module_before_fusion: "HloModule m"'
    )
    assert read_fusion_dump(text).steps == (Priced(producer="a", us_fused=2.0, us_unfused=0.0),)


@pytest.mark.parametrize("text", ["", "\n", "HloModule m", "fusion_steps { fusion {", "fusion_steps: 3", "}", '"'])
def test_what_is_no_dump_is_refused(text: str) -> None:
    with pytest.raises(DumpError, match="fusion dump"):
        read_fusion_dump(text)


def test_a_dump_cut_between_two_steps_is_refused() -> None:
    cut = DUMP[: DUMP.index("fusion_steps { a_step")]
    with pytest.raises(DumpError, match="cut off"):
        read_fusion_dump(cut)


@settings(deadline=None)
@given(st.integers(0, len(DUMP)))
def test_every_cut_is_refused_or_loses_nothing(end: int) -> None:
    try:
        dump = read_fusion_dump(DUMP[:end])
    except DumpError:
        return
    assert dump == read_fusion_dump(DUMP)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DUMP) - 1), st.text(max_size=4), st.integers(0, 6))
def test_damage_raises_nothing_but_a_dump_error(at: int, inserted: str, removed: int) -> None:
    damaged = DUMP[:at] + inserted + DUMP[at + removed :]
    try:
        read_fusion_dump(damaged)
    except DumpError as error:
        assert "capture again" in str(error)


@pytest.mark.slow
def test_real_dumps(captured: Callable[..., Capture]) -> None:
    dump = read_fusion_dump(captured("grad").require("priority_fusion_dump"))
    kinds = {type(step) for step in dump.steps}
    assert kinds == {Fused, Priced, Refused}
    assert dump.module_text.startswith("HloModule ")
    reasons = {step.reason for step in dump.steps if isinstance(step, Refused)}
    assert "not fusing because there are only bitcast users" in reasons
