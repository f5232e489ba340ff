"""`compare(keep_captures=...)`: captures that open again, and give the same analysis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from hlo_analysis import Capture, analyze
from xlafuse.catalogue import KERNELS
from xlafuse.comparison import compare


def test_each_strategys_capture_is_kept(tmp_path: Path) -> None:
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    comparison = compare(jnp.tanh, (x,), strategies=["xla"], keep_captures=tmp_path / "kept" / "here")
    assert [path.name for path in (tmp_path / "kept" / "here").iterdir()] == ["xla.zip"]
    capture = Capture.load(tmp_path / "kept" / "here" / "xla.zip")
    analysis = comparison["xla"].analysis
    assert analysis is not None
    assert replace(analyze(capture, label="xla", catalogue=KERNELS), measured=None) == replace(analysis, measured=None)
