"""Memory of compiled programs: what is counted, kept and told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import hlo_analysis
from xlafuse.bench import memory
from xlafuse.bench.results import ResultsError

SPEC = "4096-4096-128256-bfloat16-reduction_mean"


@pytest.fixture
def counted(monkeypatch):
    """Invented: ours takes 200 MB, XLA twice the logits."""

    def capture(function, *inputs, target):
        assert target == "h200"
        assert inputs[0]["w"].shape == (4096, 128256)
        temporary = 2.1e9 if len(seen) % 2 else 2e8
        seen.append(len(inputs))
        return SimpleNamespace(memory=SimpleNamespace(temp_bytes=int(temporary), peak_bytes=int(3e9)))

    seen: list[int] = []
    monkeypatch.setattr(hlo_analysis, "capture", capture)
    counts = memory.count()
    assert seen == [1, 1, 2, 2]
    return counts


def test_counts_are_kept_and_told(counted, tmp_path):
    assert [(c.phase, c.implementation, memory.is_met(c)) for c in counted.counts] == [
        *(("forward", "mosaic", True), ("forward", "xla", False)),
        *(("backward", "mosaic", True), ("backward", "xla", False)),
    ]
    assert counted.counts[0].logits_bytes == 4096 * 128256 * 2
    path = tmp_path / "memory.json"
    assert memory.load(path) is None
    memory.write(path, counted)
    assert memory.load(path) == counted
    text = memory.markdown(counted)
    short = SPEC.replace("bfloat16", "bf16")
    assert f"| `linear_cross_entropy` | backward | {short} | `mosaic` | 200 | 1051 | 3000 |" in text
    assert f"| `linear_cross_entropy` | backward | {short} | `xla` | 2100 | 1051 | 3000 |" in text
    missed = replace(counted, counts=(replace(counted.counts[0], temp_bytes=1_051_000_000),))
    assert "| **1051** | 1051 |" in memory.markdown(missed)
    assert memory.markdown(None) == "Memory: not counted."
    path.write_text('{"schema_version": 9}')
    with pytest.raises(ResultsError, match="schema version 9, expected 1"):
        memory.load(path)
