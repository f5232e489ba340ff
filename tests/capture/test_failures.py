"""Bad input and a compiler that dies: an error that says what to do, a parent that lives, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from capture_programs import FLOATS, INTEGERS, LAYER_ARGUMENTS, layer

from hlo_analysis.capture import Capture, capture, process
from hlo_analysis.capture.failures import compile_error, first_sentence
from hlo_analysis.capture.lowering import lower
from hlo_analysis.errors import CaptureError, DumpError, UnknownOptionError, UnknownTargetError
from hlo_analysis.targets import Target, load_target


def add_one(x: jax.Array) -> jax.Array:
    return x + 1


def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(text)
    monkeypatch.setattr(process, "_WORKER", script)


def test_unknown_option_says_where_the_names_are(compiler: None, temporary_folders) -> None:
    with pytest.raises(UnknownOptionError, match=r"'xla_gpu_enable_triton_gem'.*DebugOptions"):
        capture(add_one, FLOATS, compiler_options={"xla_gpu_enable_triton_gem": False})
    assert temporary_folders() == []


@pytest.mark.parametrize(
    ("value", "words"), [("perhaps", "'perhaps' is not a valid bool"), ({}, "expected a bool, number, string or list")]
)
def test_bad_option_value(value: object, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(add_one, FLOATS, target="cpu", compiler_options={"xla_cpu_enable_fast_math": value})


def test_list_option(tmp_path: Path) -> None:
    passes = ["fusion", "algsimp"]
    made = capture(add_one, FLOATS, target="cpu", compiler_options={"xla_disable_hlo_passes": passes})
    assert made.provenance.compiler_options == (("xla_disable_hlo_passes", "fusion,algsimp"),)
    assert 'xla_disable_hlo_passes: "algsimp"' in made.require("debug_options")


def test_function_that_does_not_trace(temporary_folders) -> None:
    def decides(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=r"decides could not be traced for h200.*x: bf16\[256,256\]") as error:
        capture(decides, FLOATS)
    line = decides.__code__.co_firstlineno + 1
    assert f"test_failures.py:{line}, in decides: return x if x.sum() > 0 else -x" in str(error.value)
    assert isinstance(error.value.__cause__, jax.errors.TracerBoolConversionError)
    assert temporary_folders() == []


def test_a_module_that_changes_its_state_is_told_to_be_an_argument() -> None:
    from flax import nnx

    count = nnx.Variable(jnp.zeros(()))

    def counts(x: jax.Array) -> jax.Array:
        count[...] += 1
        return x

    with pytest.raises(CaptureError, match=r"TraceContextError: Cannot mutate .* capture\(lambda model, x"):
        lower(counts, (FLOATS,), target=load_target("h200"))


def test_a_function_that_exits_or_asserts_is_told_by_its_place() -> None:
    def leaves(x: jax.Array) -> jax.Array:
        raise SystemExit(3)

    def asserts(x: jax.Array) -> jax.Array:
        raise AssertionError

    with pytest.raises(CaptureError, match=r"SystemExit: 3\n  at .*test_failures\.py:\d+, in leaves"):
        capture(leaves, FLOATS)
    with pytest.raises(
        CaptureError, match=r"AssertionError\n  at .*test_failures\.py:\d+, in asserts: raise AssertionError"
    ):
        capture(asserts, FLOATS)


def test_shapes_that_do_not_fit() -> None:
    wrong = jax.ShapeDtypeStruct((5, 256), jnp.bfloat16)
    with pytest.raises(CaptureError, match=r"weights\['kernel'\]: bf16\[5,256\].*TypeError: dot_general requires"):
        capture(layer, FLOATS, {"kernel": wrong}, INTEGERS)
    with pytest.raises(CaptureError, match="missing 1 required positional argument"):
        capture(layer, FLOATS, {"kernel": FLOATS})


def test_gradients_need_something_to_differentiate() -> None:
    with pytest.raises(CaptureError, match="no floating-point argument"):
        capture(add_one, INTEGERS, mode="grad")
    with pytest.raises(CaptureError, match="no floating-point output"):
        capture(lambda x: x.shape[0] + INTEGERS.shape[0], FLOATS, mode="grad")
    with pytest.raises(CaptureError, match="mode must be 'forward' or 'grad', not 'backward'"):
        capture(add_one, FLOATS, mode="backward")  # type: ignore[arg-type]


def test_unknown_target_shows_the_nearest() -> None:
    with pytest.raises(UnknownTargetError, match=r"'h300'.*did you mean.*'h100'"):
        capture(add_one, FLOATS, target="h300")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="has a GPU")
def test_attached_without_a_gpu() -> None:
    with pytest.raises(UnknownTargetError, match="needs an NVIDIA GPU, and this machine shows none"):
        capture(add_one, FLOATS, target="attached")


def test_what_a_call_says_of_its_parts_is_told_without_the_workers_traceback() -> None:
    said = "INTERNAL: custom_partitioner: Traceback (most recent call last):\n File\nRuntimeError: ValueError: no.\nAt"
    error = compile_error({"error": said}, load_target("h200"), "")
    assert str(error) == "ValueError: no. (a call on one device's parts, as XLA cuts them for h200)"


def test_a_segfault_of_xla_is_an_error_here(compiler: None, temporary_folders) -> None:
    # An AMD config, which load_target refuses, brings the CUDA plugin down: the parent must not notice.
    h200 = load_target("h200")
    config = (
        "gpu_device_info { core_count: 304 memory_bandwidth: 5300000000000 fpus_per_core: 128 threads_per_warp: 64 "
        'rocm_compute_capability { gcn_arch_name: "gfx942" } } platform_name: "ROCM"'
    )
    amd = Target(
        name="amd", kind="cuda", config_text=config, device=h200.device, device_kind="MI300X", compute_capability=(9, 0)
    )
    with pytest.raises(CaptureError, match=r"ended with signal \d+ \(SIG(SEGV|ABRT)\)"):
        capture(add_one, FLOATS, target=amd)
    assert temporary_folders() == []


def test_last_words_of_an_abort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import os, sys
sys.stdin.readline()
print("I1120 10:00:00.000000 1 chatter.cc:1] nothing of note", flush=True)
print("F1120 10:00:00.000000 1 shape_util.cc:1] Check failed: rank == 2 (3 vs. 2)", flush=True)
os.abort()
"""
    fake_worker(tmp_path, monkeypatch, text)
    with pytest.raises(CaptureError, match=r"signal 6 \(SIGABRT\)") as error:
        capture(add_one, FLOATS)
    assert "Check failed: rank == 2 (3 vs. 2)" in error.value.last_words
    assert "Check failed" in str(error.value)
    assert "nothing of note" not in str(error.value)


def test_a_worker_that_is_dead_before_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(tmp_path, monkeypatch, "raise SystemExit('no JAX here')")
    with pytest.raises(CaptureError, match="exit status 1") as error:
        capture(add_one, FLOATS)
    assert error.value.last_words == "no JAX here"


def test_a_hang_ends_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary_folders) -> None:
    text = f"""
import subprocess, sys, time
sys.stdin.readline()
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
print("W1120 10:00:00.000000 1 slow.cc:1] still at it", flush=True)
time.sleep(600)
"""
    fake_worker(tmp_path, monkeypatch, text)
    started = time.monotonic()
    with pytest.raises(CaptureError, match=r"did not finish compiling within 3 s.*timeout=") as error:
        capture(add_one, FLOATS, timeout=3.0)
    assert time.monotonic() - started < 60
    assert "still at it" in error.value.last_words
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)
    assert temporary_folders() == []


def alive(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_without_ptxas_the_decisions_stay(without_ptxas: dict[str, str]) -> None:
    made = capture(layer, *LAYER_ARGUMENTS, compiler_options=without_ptxas)
    assert not made.manifest.complete
    assert "no working ptxas" in made.provenance.notes[0]
    assert "nvidia-cuda-nvcc" in made.provenance.notes[0]
    assert "ptxas exited with non-zero error code" in made.provenance.notes[0]
    for key in ("before_priority_fusion", "after_priority_fusion", "after_rename", "priority_fusion_dump", "final_hlo"):
        assert made.text(key), key
    assert made.text("thunk_sequence") is None
    with pytest.raises(DumpError, match=r"has no 'thunk_sequence'.*no working ptxas"):
        made.require("thunk_sequence")


def test_with_no_ptxas_anywhere(compiler: None, tmp_path: Path) -> None:
    """The real thing: a mount namespace in which no toolkit is left."""
    empty = tmp_path / "empty"
    empty.mkdir()
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    folders = [path.resolve() for path in (Path("/usr/local/cuda/bin"), *(root / "cu13" / "bin" for root in wheels))]
    mounts = [f"mount --bind '{empty}' '{folder}'" for folder in folders if folder.is_dir()]
    if (
        not shutil.which("unshare")
        or subprocess.run(
            ["unshare", "-rm", "sh", "-c", " && ".join(["true", *mounts])], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs unprivileged mount namespaces")
    program = """
import jax, jax.numpy as jnp
from hlo_analysis.capture import capture
made = capture(lambda x: jnp.tanh(x @ x), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
print(made.manifest.complete, bool(made.text("priority_fusion_dump")), made.text("thunk_sequence"))
print(made.provenance.notes[0])
"""
    command = " && ".join([*mounts, 'PATH=/bin:/usr/bin exec "$0" -c "$1"'])
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, sys.executable, program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    verdict, note = done.stdout.splitlines()
    assert verdict == "False True None"
    assert note.endswith("XLA said: UNAVAILABLE: No PTX compilation provider is available.")


def test_without_the_cuda_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "jax_plugins" / "xla_cuda13"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize(): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CaptureError, match=r"needs XLA's CUDA compiler.*pip install 'xlafuse\[deviceless\]'"):
        capture(add_one, FLOATS)


def test_flags_of_the_environment_do_not_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=true")
    made = capture(add_one, FLOATS, target="cpu")
    assert any("XLA_FLAGS of the environment did not apply" in note for note in made.provenance.notes)
    assert os.environ["XLA_FLAGS"] == "--xla_no_such_flag=true"


def test_keep_needs_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CaptureError, match="empty or does not exist"):
        capture(add_one, FLOATS, target="cpu", keep=tmp_path)
    with pytest.raises(CaptureError, match="empty or does not exist"):
        capture(add_one, FLOATS, target="cpu", keep=tmp_path / "file")
    with pytest.raises(CaptureError, match="cannot be written"):
        capture(add_one, FLOATS, target="cpu", keep="/proc/nowhere")
    assert (tmp_path / "file").read_text() == "mine"


def test_failure_leaves_the_kept_folder_as_it_was(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for keep in (mine, tmp_path / "new"):
        with pytest.raises(UnknownOptionError):
            capture(add_one, FLOATS, target="cpu", compiler_options={"xla_no_such_option": 1}, keep=keep)
    assert list(tmp_path.iterdir()) == [mine]
    assert list(mine.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("UNAVAILABLE: No provider. Neither a nor b\nDetails", "UNAVAILABLE: No provider."),
        ("libdevice not found at ./libdevice.10.bc", "libdevice not found at ./libdevice.10.bc."),
        ("x" * 400, "x" * 300 + "."),
    ],
)
def test_first_sentence(error: str, sentence: str) -> None:
    assert first_sentence(error) == sentence


def test_capture_is_what_the_package_gives() -> None:
    import hlo_analysis

    assert hlo_analysis.capture is capture
    assert hlo_analysis.Capture is Capture
