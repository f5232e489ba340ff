"""Recorded autotuning: what is replayed, how much of it fits, and how recordings are merged."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hlo_analysis import analyze
from hlo_analysis.capture import capture, merge_autotune
from hlo_analysis.capture.autotune import Replay, describe, entries
from hlo_analysis.errors import CaptureError, DumpError
from hlo_analysis.targets import load_target
from hlo_analysis.targets.textproto import parse_textproto

RECORDING = Path(__file__).parent / "data" / "h200_down_projection.txtpb"
HIDDEN = jax.ShapeDtypeStruct((2, 4096, 14336), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((14336, 4096), jnp.bfloat16)

H200, ATTACHED = load_target("h200"), load_target("attached")

GEMM = '%gemm_fusion_dot = bf16[8,8] fusion(%x), backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}'
OTHER = '%gemm_fusion_dot.1 = bf16[4,8] fusion(%x), backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}'
LOOP = "%loop_fusion = bf16[8,8] fusion(%gemm_fusion_dot), kind=kLoop"
PREFIX = "I1120 10:11:36.253561   28438 config_assigner.cc:332] "


def down(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def test_a_recorded_choice_is_replayed(compiler: None) -> None:
    replayed = capture(down, HIDDEN, WEIGHT, autotune=RECORDING)
    assert replayed.provenance.gemm_choice == "replayed"
    assert (replayed.provenance.autotune_hits, replayed.provenance.autotune_lookups) == (1, 1)
    assert replayed.provenance.notes == ()
    assert replayed.require("thunk_sequence").startswith("001: kCublasLtMatmul")


def test_without_the_recording_xla_takes_its_default(compiler: None) -> None:
    plain = capture(down, HIDDEN, WEIGHT, autotune=None)
    assert plain.provenance.gemm_choice == "default"
    assert "No recorded autotuning was replayed" in plain.provenance.notes[0]
    assert plain.require("thunk_sequence").startswith("001: kCustomKernel")


def test_a_product_that_no_gpu_tuned_is_estimated_as_a_library_s(compiler: None) -> None:
    """XLA's choice takes 82.9 µs on an H200 (recording of vit/forward), its own emitter would take 800."""
    heads = jax.ShapeDtypeStruct((64, 16, 197, 64), jnp.bfloat16)
    plain = analyze(capture(lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), heads, heads, autotune=None))
    assert "Estimates are of a library's products" in plain.provenance.notes[0]
    assert plain.estimated_us == pytest.approx(82.9, rel=0.3)


def log(*lookups: tuple[str, bool]) -> str:
    lines: list[str] = []
    for text, found in lookups:
        lines.append(f"{PREFIX}Getting config for HLO: {text}")
        if found:
            lines.append(f"{PREFIX}Found cached config for HLO: {text}")
    hits = sum(found for _, found in lookups)
    lines.append(f"{PREFIX}Config assigner cache stats: hits={hits}, misses={len(lookups) - hits} (strict_hits={hits})")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("lookups", "expected"),
    [
        ([(GEMM, True), (LOOP, True)], Replay(choice="replayed", hits=2, lookups=2, gemm_hits=1, gemms=1)),
        ([(LOOP, True)], Replay(choice="none", hits=1, lookups=1)),
        ([], Replay(choice="none")),
    ],
)
def test_counts_without_notes(lookups: list[tuple[str, bool]], expected: Replay) -> None:
    assert describe(log(*lookups), H200, RECORDING) == expected


def test_part_of_the_choices_replayed() -> None:
    replay = describe(log((GEMM, True), (OTHER, False), (LOOP, False)), H200, RECORDING)
    assert (replay.choice, replay.hits, replay.lookups) == ("replayed", 1, 3)
    assert replay.notes == (
        "The recorded autotuning knows 1 of 2 distinct matrix products and 1 of 3 choices in all; the other 2 are "
        "XLA's default. Estimates are of a library's products, which a GPU would choose for most.",
    )


def test_only_other_choices_replayed_is_default() -> None:
    replay = describe(log((GEMM, False), (LOOP, True)), H200, RECORDING)
    assert (replay.choice, replay.hits, replay.lookups) == ("default", 1, 2)
    assert "does not fit" in replay.notes[0]


def test_a_recording_of_another_version_is_named() -> None:
    text = log((GEMM, False)).replace("(strict_hits", "(version_mismatch=1, strict_hits")
    assert "another version of XLA" in describe(text, H200, RECORDING).notes[-1]
    assert "another version of XLA" not in describe(text.replace("=1,", "=0,"), H200, RECORDING).notes[-1]


def test_an_attached_gpu_chooses_itself() -> None:
    assert describe(log((GEMM, False)), ATTACHED, None).choice == "attached"


def test_bad_recordings(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"absent\.txtpb.*no such file"):
        capture(down, HIDDEN, WEIGHT, autotune=tmp_path / "absent.txtpb")
    for text in ("entries {", "gpu_device_info { core_count: 1 }", "not a proto!"):
        path = tmp_path / "bad.txtpb"
        path.write_text(text)
        with pytest.raises(CaptureError, match="is not a recorded autotuning"):
            capture(down, HIDDEN, WEIGHT, autotune=path)


def test_the_shipped_recording_is_one() -> None:
    shipped = load_target("h200").autotune
    assert shipped is not None
    found = entries(shipped.read_text())
    backends = [entry.message("value").message("optimal_config").scalar("backend") for entry in found.values()]
    assert len(found) > 100
    assert backends.count("CUBLASLT_FISSION") > 5
    assert merge_autotune([shipped.read_text()] * 2) == merge_autotune([shipped.read_text()])


def entry(fingerprint: str, backend: str) -> str:
    return f"""entries {{
  key {{ target {{ device: "d" hlo_fingerprint: "{fingerprint}" }} environment {{ codegen_version: "v" }} }}
  value {{ optimal_config {{ backend: {backend} }} }}
}}
"""


def test_merge_keeps_each_choice_once_and_the_last_one_wins() -> None:
    merged = merge_autotune([entry("a", "TRITON") + entry("b", "TRITON"), "version: 3\n" + entry("a", "CUBLASLT")])
    found = [
        (
            item.message("key").message("target").scalar("hlo_fingerprint"),
            item.message("value").message("optimal_config").scalar("backend"),
        )
        for item in entries(merged).values()
    ]
    assert found == [("a", "CUBLASLT"), ("b", "TRITON")]
    assert parse_textproto(merged).scalar("version") == "3"
    assert merge_autotune([merged, merged]) == merged
    assert merge_autotune([]) == "\n"


def test_merge_refuses_what_does_not_belong_together() -> None:
    with pytest.raises(DumpError, match="different versions"):
        merge_autotune(["version: 3", "version: 4"])
    with pytest.raises(DumpError, match="found 'results'"):
        merge_autotune(['results { device: "x" }'])


def test_a_merged_recording_replays(compiler: None, tmp_path: Path) -> None:
    path = tmp_path / "merged.txtpb"
    path.write_text(merge_autotune([entry("a", "TRITON"), RECORDING.read_text()]))
    replayed = capture(down, HIDDEN, WEIGHT, autotune=path)
    assert (replayed.provenance.autotune_hits, replayed.provenance.autotune_lookups) == (1, 1)
