"""Dumps and archives that are too large: refused by name, before they fill memory or disk."""

from __future__ import annotations

import shutil
import struct
import time
import zipfile
from pathlib import Path

import pytest

from hlo_analysis.capture import Capture, Limits
from hlo_analysis.capture.artefacts import modules
from hlo_analysis.errors import DumpError

HLO = "HloModule jit_f\n"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "dump"
    folder.mkdir()
    for name in ("before_optimizations", "sm_9.0a_gpu_after_optimizations"):
        (folder / f"module_0001.jit_f.{name}.txt").write_text(HLO)
    return folder


def test_a_file_above_the_limit_is_not_read(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture.load(dump, limits=Limits(file_bytes=len(HLO) - 1))
    message = (
        r"gpu_after_optimizations\.txt has 16 bytes, more than the limit of 15 \(file_bytes\)\. If you trust it, set "
        r"HLO_ANALYSIS_MAX_FILE_BYTES=16, or in Python Capture\.load\(path, limits=Limits\(file_bytes=16\)\)"
    )
    with pytest.raises(DumpError, match=message):
        capture.text("final_hlo")
    monkeypatch.setenv("HLO_ANALYSIS_MAX_FILE_BYTES", "15")
    with pytest.raises(DumpError, match="file_bytes"):
        Capture.load(dump).text("final_hlo")
    monkeypatch.setenv("HLO_ANALYSIS_MAX_FILE_BYTES", "16")
    assert Capture.load(dump).text("final_hlo") == HLO


def test_too_many_files(dump: Path) -> None:
    assert Capture.load(dump, limits=Limits(files=2)).text("final_hlo") == HLO
    with pytest.raises(DumpError, match=r"holds 2 files, more than the limit of 1 \(files\)"):
        Capture.load(dump, limits=Limits(files=1))
    archive = shutil.make_archive(str(dump), "zip", dump)
    with pytest.raises(DumpError, match=r"dump\.zip holds 2 files, more than the limit of 1 \(files\)"):
        Capture.load(archive, limits=Limits(files=1))


def test_an_archive_bomb_is_refused_before_it_unpacks(dump: Path, temporary_folders) -> None:
    bomb = dump.with_name("bomb.zip")
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(4):
            archive.writestr(f"module_000{number}.jit_f.before_optimizations.txt", bytes(1 << 20))
    assert bomb.stat().st_size < 10_000
    with pytest.raises(
        DumpError, match=r"unpacks to 4,194,304 bytes, more than the limit of 4,194,303 \(total_bytes\)"
    ):
        Capture.load(bomb, limits=Limits(total_bytes=(4 << 20) - 1))
    assert temporary_folders() == []


def test_a_bomb_that_states_a_small_size_gives_no_more(dump: Path, temporary_folders) -> None:
    bomb = dump.with_name("bomb.zip")
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("module_0001.jit_f.before_optimizations.txt", bytes(1 << 20))
    data = bomb.read_bytes()
    assert data.count(struct.pack("<I", 1 << 20)) == 2  # in the file's header and in the directory
    bomb.write_bytes(data.replace(struct.pack("<I", 1 << 20), struct.pack("<I", 16)))
    with pytest.raises(DumpError, match="not a readable archive"):
        Capture.load(bomb)
    assert temporary_folders() == []


def test_limits_of_the_environment(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLO_ANALYSIS_MAX_FILES", "many")
    with pytest.raises(DumpError, match="expected a whole number in HLO_ANALYSIS_MAX_FILES, got 'many'"):
        Capture.load(dump)


def test_thousands_of_modules_are_told_apart_quickly() -> None:
    names = [
        f"module_{number:04}.jit_f.{end}.txt"
        for number in range(2000)
        for end in ("before_optimizations", "sm_9.0_gpu_after_optimizations", "thunk_sequence")
    ]
    start = time.process_time()
    found = modules(reversed(names))
    assert time.process_time() - start < 1.0  # 0.02 s of one core; 5 s where every module looks at every name
    assert len(found) == 2000
    assert all(len(files) == 3 for files in found.values())
