"""Captures on disk: saved and loaded, made by somebody else's dump, cut off, or hostile."""

from __future__ import annotations

import gc
import json
import shutil
import stat
import zipfile
from pathlib import Path

import pytest

from hlo_analysis.capture import Capture
from hlo_analysis.errors import DumpError


@pytest.fixture
def dump(gemm: Capture, tmp_path: Path) -> Path:
    """A folder such as xla_dump_to leaves."""
    return shutil.copytree(gemm.path / gemm.manifest.dump, tmp_path / "dump")


def test_saved_and_loaded(gemm: Capture, tmp_path: Path) -> None:
    path = gemm.save(tmp_path / "layer.zip")
    assert path == tmp_path / "layer.zip"
    assert [file.name for file in tmp_path.iterdir()] == ["layer.zip"]
    loaded = Capture.load(path)
    assert loaded.manifest == gemm.manifest
    assert loaded.keys == gemm.keys
    for key in gemm.keys:
        if key != "stablehlo":
            assert loaded.text(key) == gemm.text(key), key
    again = loaded.save(tmp_path / "again.zip")
    assert Capture.load(again).manifest == gemm.manifest


def test_loaded_files_go_with_the_capture(gemm: Capture, tmp_path: Path, temporary_folders) -> None:
    loaded = Capture.load(gemm.save(tmp_path / "layer.zip"))
    assert len(temporary_folders()) == 1
    del loaded
    gc.collect()
    assert temporary_folders() == []


def test_folder_is_loaded_where_it_is(gemm: Capture, tmp_path: Path) -> None:
    folder = shutil.copytree(gemm.path, tmp_path / "layer")
    loaded = Capture.load(folder)
    assert loaded.path == folder
    assert loaded.manifest == gemm.manifest
    del loaded
    gc.collect()
    assert folder.is_dir()


def test_saving_replaces_whole_or_not_at_all(gemm: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "layer.zip"
    path.write_text("what was there")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "writestr", full)
        with pytest.raises(DumpError, match="No space left on device"):
            gemm.save(path)
    assert path.read_text() == "what was there"
    assert [file.name for file in tmp_path.iterdir()] == ["layer.zip"]
    gemm.save(path)
    assert Capture.load(path).manifest == gemm.manifest


def test_saving_where_nothing_can_be_written(gemm: Capture, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="is not a folder"):
        gemm.save(tmp_path / "absent" / "layer.zip")
    with pytest.raises(DumpError, match="cannot save"):
        gemm.save("/proc/layer.zip")


def test_dump_of_somebody_else(gemm: Capture, dump: Path) -> None:
    loaded = Capture.load(dump)
    assert loaded.manifest.label == "jit_layer"
    assert loaded.manifest.target == "NVIDIA H200"
    assert loaded.manifest.device.matrix_flops == gemm.manifest.device.matrix_flops
    assert loaded.manifest.complete
    assert loaded.provenance.function == "layer"
    assert loaded.provenance.gemm_choice == "none"
    assert "how it was made is not known" in loaded.provenance.notes[0]
    for key in ("final_hlo", "thunk_sequence", "priority_fusion_dump", "after_rename"):
        assert loaded.text(key) == gemm.text(key), key


def test_zip_of_a_dump_with_its_folder(gemm: Capture, dump: Path, tmp_path: Path) -> None:
    path = shutil.make_archive(str(tmp_path / "dump"), "zip", tmp_path, "dump")
    loaded = Capture.load(path)
    assert loaded.text("final_hlo") == gemm.text("final_hlo")


def test_dump_with_several_modules(gemm: Capture, dump: Path) -> None:
    for name in ("before_optimizations", "sm_9.0a_gpu_after_optimizations"):
        (dump / f"module_0007.jit_tiny.{name}.txt").write_text("HloModule jit_tiny\n")
    loaded = Capture.load(dump)
    assert loaded.manifest.module == gemm.manifest.module
    assert any("module_0007.jit_tiny" in note for note in loaded.provenance.notes)
    tiny = Capture.load(dump, module="jit_tiny")
    assert tiny.text("final_hlo") == "HloModule jit_tiny\n"
    assert not tiny.manifest.complete
    with pytest.raises(DumpError, match=r"no module 'jit_other'; it has .*jit_tiny"):
        Capture.load(dump, module="jit_other")


def test_dump_of_the_cpu_compiler(tmp_path: Path) -> None:
    from capture_programs import LAYER_ARGUMENTS, layer

    from hlo_analysis.capture import capture

    made = capture(layer, *LAYER_ARGUMENTS, target="cpu")
    loaded = Capture.load(shutil.copytree(made.path / "dump", tmp_path / "dump"))
    assert loaded.manifest.kind == loaded.manifest.target == "cpu"
    assert loaded.text("final_hlo") == made.text("final_hlo")
    assert loaded.manifest.complete


def test_partial_dump_says_what_is_missing(dump: Path) -> None:
    for file in [*dump.glob("*fusion*"), *dump.glob("*gpu_target_config*")]:
        file.unlink()
    loaded = Capture.load(dump)
    assert not loaded.manifest.complete
    notes = " ".join(loaded.provenance.notes)
    assert "lacks priority_fusion_dump, before_priority_fusion, after_rename, target_config" in notes
    assert "assumes an H200" in notes


def test_dump_cut_off_in_the_middle(dump: Path) -> None:
    for file in dump.glob("*after_optimizations*"):
        file.unlink()
    with pytest.raises(DumpError, match=r"was cut off.*after_optimizations\.txt"):
        Capture.load(dump)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="does not exist"):
        Capture.load(tmp_path / "absent")
    with pytest.raises(DumpError, match="is empty"):
        Capture.load(tmp_path)
    (tmp_path / "notes.md").write_text("nothing of XLA's")
    with pytest.raises(DumpError, match=r"holds no XLA dump.*found notes\.md"):
        Capture.load(tmp_path)
    with pytest.raises(DumpError, match="neither a folder nor a capture's zip"):
        Capture.load(tmp_path / "notes.md")
    (tmp_path / "module_0001.jit_f.hlo.pb").write_bytes(b"\x00")
    with pytest.raises(DumpError, match=r"no HLO text.*xla_dump_hlo_as_text"):
        Capture.load(tmp_path)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_archive_cut_off(keep: float, gemm: Capture, tmp_path: Path, temporary_folders) -> None:
    path = gemm.save(tmp_path / "layer.zip")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DumpError, match="cut off"):
        Capture.load(path)
    assert temporary_folders() == []


def test_archive_with_damaged_data(gemm: Capture, tmp_path: Path, temporary_folders) -> None:
    path = gemm.save(tmp_path / "layer.zip")
    data = bytearray(path.read_bytes())
    data[200:400] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(DumpError, match="not a readable archive"):
        Capture.load(path)
    assert temporary_folders() == []


@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/outside.txt", "a/../../outside.txt", "..\\outside.txt"])
def test_archive_that_reaches_outside(name: str, tmp_path: Path, temporary_folders) -> None:
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(DumpError, match="leads out of it"):
        Capture.load(path)
    assert temporary_folders() == []
    assert not list(tmp_path.rglob("outside.txt"))


def test_archive_with_a_link(tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo("link")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/hostname")
    with pytest.raises(DumpError, match="other than plain files"):
        Capture.load(path)


def edited(gemm: Capture, tmp_path: Path, **changes: object) -> Path:
    folder = shutil.copytree(gemm.path, tmp_path / "edited")
    manifest = json.loads((folder / "capture.json").read_text())
    (folder / "capture.json").write_text(json.dumps(manifest | changes))
    return folder


def test_manifest_of_another_format(gemm: Capture, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="format 99; this version reads format 1"):
        Capture.load(edited(gemm, tmp_path, format=99))


def test_manifest_that_reaches_outside(gemm: Capture, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"outside its folder: \.\./secret"):
        Capture.load(edited(gemm, tmp_path, files={"final_hlo": "../secret"}))


def test_manifest_that_is_no_manifest(gemm: Capture, tmp_path: Path) -> None:
    folder = edited(gemm, tmp_path, provenance=7)
    with pytest.raises(DumpError, match="is not a capture's manifest"):
        Capture.load(folder)
    (folder / "capture.json").write_text("{")
    with pytest.raises(DumpError, match="is not a capture's manifest"):
        Capture.load(folder)


def test_files_missing_from_a_capture(gemm: Capture, tmp_path: Path) -> None:
    folder = shutil.copytree(gemm.path, tmp_path / "layer")
    (folder / gemm.manifest.files["final_hlo"]).unlink()
    with pytest.raises(DumpError, match="files missing: final_hlo"):
        Capture.load(folder)
