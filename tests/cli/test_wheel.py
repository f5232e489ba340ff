"""The wheel has all files that a report needs: built, put into an empty folder, and run from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(folder: Path, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, words)), env=kept | environment, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_report_from_the_installed_wheel(tmp_path: Path):
    built = _run(tmp_path, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("pip has no hatchling to build with")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("xlafuse-*.whl")
    assert wheel.stat().st_size < 5_000_000
    site = tmp_path / "site"
    assert (
        _run(
            tmp_path, sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel
        ).returncode
        == 0
    )
    (tmp_path / "model.py").write_text("import jax\n\n\ndef fn(x):\n    return jax.nn.softmax(x).sum(0)\n")
    words = ("report", "--fn", f"{tmp_path}/model.py:fn", "--shape", "f32[64,128]", "--strategies", "xla", "--try", "0")
    script = "import xlafuse, xlafuse.cli; print(xlafuse.__file__); xlafuse.cli.app()"
    out = tmp_path / "out"
    done = _run(tmp_path, sys.executable, "-c", script, *words, "-o", out, "--keep-capture", out, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert "</html>" in (out / "report.html").read_text(encoding="utf-8")
    alone = ("isolate", "0", "--capture", out / "xla.zip", "-o", out)
    assert _run(tmp_path, sys.executable, "-c", script, *alone, PYTHONPATH=str(site)).returncode == 0
    assert (out / "reproduce.py").is_file()
