"""The shipped targets, and the ones that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlo_analysis.errors import UnknownTargetError
from hlo_analysis.targets import load_target, target_from_config, target_names
from hlo_analysis.targets.peaks import PEAKS

# Streaming multiprocessors, GB/s, compute capability.
FACTS = {
    "a100": (108, 2039.04, (8, 0)),
    "a6000": (84, 768.096, (8, 6)),
    "b200": (148, 7672.32, (10, 0)),
    "h100": (132, 3352.32, (9, 0)),
    "h200": (132, 4814.304, (9, 0)),
    "rtx-pro-6000": (188, 1792.0, (12, 0)),
}


def test_names() -> None:
    assert target_names() == (*sorted(FACTS), "attached", "cpu")


@pytest.mark.parametrize("name", sorted(FACTS))
def test_facts_of_shipped_targets(name: str) -> None:
    target = load_target(name)
    cores, bandwidth, capability = FACTS[name]
    assert target.kind == "cuda"
    assert target.core_count == cores
    assert target.compute_capability == capability
    assert target.device.memory_bandwidth == pytest.approx(bandwidth * 1e9)
    peaks = dict(target.device.matrix_flops)
    assert peaks["bf16"] == peaks["f16"] == 2 * peaks["f32"]
    assert peaks["s8"] == pytest.approx(2 * peaks["bf16"], rel=1e-3)
    assert target.device.vector_flops < peaks["f32"]
    assert target.device.launch_overhead_us == 2.4
    assert "datasheet" in target.device.source or "whitepaper" in target.device.source
    assert f"f32 as TF32 {peaks['f32'] / 1e12:.0f} TFLOP/s" in target.device.matrix_peaks
    text = target.config_text
    assert text.startswith("# ")
    assert "Source:" in text[:200], "every target says where its figures come from"


def test_datasheet_peaks_agree_with_what_xla_read_off_the_device() -> None:
    text = load_target("h200").config_text
    renamed = text.replace('"NVIDIA H200"', '"Some other GPU"')
    computed = target_from_config("computed", renamed).device
    datasheet = dict(load_target("h200").device.matrix_flops)
    assert "Some other GPU" not in PEAKS
    assert dict(computed.matrix_flops).keys() == datasheet.keys()
    for element_type, flops in computed.matrix_flops:
        assert flops == pytest.approx(datasheet[element_type], rel=0.001), element_type
    assert computed.vector_flops == pytest.approx(66.9e12, rel=0.001)
    assert "computed from XLA's target config" in computed.source


def test_recorded_autotuning_is_shipped_for_the_h200_alone() -> None:
    recorded = {name for name in FACTS if load_target(name).autotune}
    assert recorded == {"h200"}


def test_path_to_a_recorded_config(tmp_path: Path) -> None:
    path = tmp_path / "module_0001.jit_f.gpu_target_config.pbtxt"
    path.write_text(load_target("a100").config_text)
    target = load_target(path)
    assert target.name == "module_0001.jit_f"
    assert target.device_kind == "NVIDIA A100-SXM4-80GB"
    assert dict(target.device.matrix_flops) == dict(load_target("a100").device.matrix_flops)


def test_cpu_and_attached_need_nothing() -> None:
    assert load_target("cpu").kind == "cpu"
    assert load_target("attached").kind == "attached"


@pytest.mark.parametrize(("name", "near"), [("h20", "h200"), ("H200", None), ("rtx6000", "a6000"), ("a1000", "a100")])
def test_unknown_name_shows_the_nearest(name: str, near: str | None) -> None:
    with pytest.raises(UnknownTargetError, match="expected one of a100, a6000, b200") as error:
        load_target(name)
    if near:
        assert f"'{near}'" in str(error.value).partition("did you mean")[2]


ROCM = """
gpu_device_info {
  core_count: 304 memory_bandwidth: 5300000000000 device_vendor: "Advanced Micro Devices, Inc"
  rocm_compute_capability { gcn_arch_name: "gfx942" }
}
platform_name: "ROCM" device_description_str: "AMD Instinct MI300X"
"""
VOLTA = """
gpu_device_info { core_count: 80 memory_bandwidth: 898000000000 cuda_compute_capability { major: 7 } }
platform_name: "CUDA" device_description_str: "Tesla V100-SXM2-16GB"
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROCM, "AMD.*only NVIDIA GPUs"),
        (ROCM.replace("ROCM", "CUDA"), "Advanced Micro Devices.*only NVIDIA GPUs"),
        (VOLTA, "compute capability 7.0: 8.0 .Ampere. or later"),
        ('module { name: "x" }', "no gpu_device_info"),
        ("this is not { a proto", "not a GpuTargetConfigProto"),
        ('gpu_device_info { core_count: 1 } platform_name: "CUDA"', "no cuda_compute_capability"),
        (VOLTA.replace("major: 7", "major: 9").replace("80", "0"), "core_count and memory_bandwidth"),
    ],
)
def test_configs_that_cannot_be_compiled_for(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "recorded.txtpb"
    path.write_text(text)
    with pytest.raises(UnknownTargetError, match=words):
        load_target(path)
