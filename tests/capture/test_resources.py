"""What the assembler and Mosaic say of kernels, read from their own words."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hlo_analysis.capture import resources
from hlo_analysis.capture.assemble import _too_large
from hlo_analysis.records import Memory
from hlo_analysis.targets import load_target

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spills' for 'sm_90a'
ptxas info    : Function properties for spills
    1088 bytes stack frame, 1044 bytes spill stores, 2052 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 8320 bytes smem, 16 bytes cmem[2]
ptxas info    : Compiling entry function 'calls' for 'sm_90a'
ptxas info    : Function properties for calls
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for helper
    64 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""


def test_ptxas_report() -> None:
    spills, calls = resources.parse_ptxas(PTXAS)
    assert spills == {
        "kernel": "spills",
        "registers": 168,
        "stack_bytes": 1088,
        "spill_store_bytes": 1044,
        "spill_load_bytes": 2052,
        "static_shared_bytes": 8320,
    }
    assert calls["registers"] == 12
    assert calls["spill_store_bytes"] == 0, "the entry's own line comes first"
    assert calls["static_shared_bytes"] == 0
    assert resources.parse_ptxas("ptxas fatal") == []


LAUNCH = """
    %c132 = arith.constant 132 : index loc(#loc1)
    %c128_3 = arith.constant 128 : index loc(#loc1)
    %c1 = arith.constant 1 : index loc(#loc2)
    %c65536_i32 = arith.constant 65536 : i32 loc(#loc2)
    %24 = gpu.launch_func async [%4] @k::@k blocks in (%c132, %c1, %c1) threads in (%c128_3, %c1, %c1)  """
LAUNCH += "dynamic_shared_memory_size %c65536_i32 args(%5 : !llvm.ptr) loc(#loc1)\n"


@pytest.mark.parametrize(
    ("log", "grid", "shared"),
    [
        (LAUNCH, [132, 1, 1], 65536),
        (LAUNCH.replace("%c132 =", "%other ="), None, 65536),
        ("nothing", None, None),
        (None, None, None),
    ],
)
def test_mosaic_launch(log: str | None, grid: list[int] | None, shared: int | None, tmp_path: Path) -> None:
    for number in (10, 9):
        (tmp_path / f"k_{number}.ptxas").write_text(PTXAS.replace("spills' for", f"spills_{number}' for"))
        if log is not None:
            (tmp_path / f"k_{number}.mlir-passes.log").write_text(log)
    (tmp_path / "k_9.ptx").write_text(".entry spills_9()")
    text = resources.mosaic_resources(tmp_path)
    assert text is not None
    kernels = json.loads(text)
    assert [kernel["kernel"] for kernel in kernels] == ["spills_9", "calls", "spills_10", "calls"]
    assert kernels[0]["grid"] == grid
    assert kernels[0]["dynamic_shared_bytes"] == shared
    assert [kernel["ptx"] for kernel in kernels] == [".entry spills_9()"] * 2 + [None] * 2


def test_no_mosaic_kernels(tmp_path: Path) -> None:
    assert resources.mosaic_resources(tmp_path) is None


def test_the_ptxas_of_the_wheel_is_taken_before_an_older_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, wheel = tmp_path / "bin/ptxas", tmp_path / "nvidia/cu13/bin/ptxas"
    for path in (old, wheel):
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setattr(resources, "find_spec", lambda _: ModuleSpec("nvidia", None, is_package=True))
    assert resources.find_ptxas() == str(old)
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(resources, "find_spec", lambda _: spec)
    assert resources.find_ptxas() == str(wheel)


def test_ptxas_that_is_missing_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "find_ptxas", lambda: None)
    assert resources.ptx_resources([tmp_path / "a.ptx"], (9, 0)) == (
        None,
        "Registers and spills are not known: no ptxas was found.",
    )
    monkeypatch.setattr(resources, "find_ptxas", lambda: "/bin/false")
    text, note = resources.ptx_resources([tmp_path / "a.ptx"], (9, 0))
    assert text is None
    assert note.startswith("Registers and spills are not known: ptxas said")


def test_a_program_that_is_larger_than_the_gpu_is_said_to_be() -> None:
    h200 = load_target("h200")
    assert _too_large(Memory(peak_bytes=h200.memory_bytes), h200) == []
    (note,) = _too_large(Memory(peak_bytes=2 * h200.memory_bytes), h200)
    assert f"{2 * h200.memory_bytes / 1e9:.0f} GB" in note
    assert "would not run" in note
