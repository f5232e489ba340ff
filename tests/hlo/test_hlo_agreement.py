"""Our parser and jaxlib's agree on every stage of every program."""

import pytest
from hlo_programs import PROGRAMS
from oracle import assert_agrees

from hlo_analysis.hlo import parse_module

NAMES = (*PROGRAMS, "collectives", "partitioned")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("program", NAMES)
def test_agrees_with_jaxlib(texts, platform, program):
    modules = texts(platform, program)
    assert len(modules) >= 2  # before and after optimizations at the least
    for text in modules.values():
        assert assert_agrees(parse_module(text), text) >= 2


def test_programs_hold_what_they_are_for(texts):
    wanted = {
        "scan_grad": ("while(", "body=%", "dynamic-update-slice("),
        "while_loop": ("while(", "condition=%"),
        "conditional": ("conditional(", "branch_computations={"),
        "sort": ("sort(", "is_stable="),
        "convolution": ("window={size=", "dim_labels=b01f_01io->b01f"),
        "linear_algebra": ("custom-call(", 'custom_call_target="'),
        "collectives": ("all-reduce", "collective-permute", "all-gather", "all-to-all", "reduce-scatter"),
        "narrow_types": ("s4[", "f8e4m3fn[", "f8e5m2[", "u4["),
        "int4_result": (":E(4)",),
        "dynamic_slices": ("dynamic_slice_sizes=", "gather("),
        "donated": ("input_output_alias={",),
        "complex_fft": ("c64[", "fft_type=FFT"),
        "partitioned": ("num_partitions=4", "sharding="),
        "constants": ("{ { 1, 2 }, { 3, 4 } }", "nan", "-inf"),
    }
    for program, constructs in wanted.items():
        text = "\n".join([*texts("cpu", program).values(), *texts("cuda", program).values()])
        for construct in constructs:
            assert construct in text, (program, construct)


def test_text_of_a_gpu_module_is_kept(texts):
    for text in texts("cuda", "block_grad").values():
        module = parse_module(text)
        for computation in module.computations.values():
            assert computation.text in text
            assert computation.text.endswith("}")
            for instruction in computation.instructions.values():
                if "#" not in instruction.name:
                    assert f"\n  {instruction.text}\n" in text
