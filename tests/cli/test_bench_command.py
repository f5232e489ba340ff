"""The options of `xlafuse bench`: which settings the measuring process is given, and what is refused."""

from __future__ import annotations

import time

import pytest

from xlafuse.bench import supervisor


@pytest.fixture
def asked(invoke, monkeypatch, tmp_path):
    """Runs `xlafuse bench` as far as the measuring process; returns the items and the settings."""

    def run(*words: str):
        def measure(items, settings, output, **options):
            found.append((list(items), settings))
            raise supervisor.BenchError("nothing was measured")

        found: list = []
        monkeypatch.setattr(supervisor, "run", measure)
        result = invoke("bench", words[0], "-o", str(tmp_path / "out.json"), *words[1:])
        assert result.exit_code == 2
        return found[0] if found else result.stderr

    return run


def test_lists_times_and_flags(asked):
    items, settings = asked("kernels", "--op", "rope", "--phase", "forward", "--peers", "liger, fa3", "--variants")
    assert (items, settings.phases, settings.peers, settings.variants) == (
        ["rope"],
        ("forward",),
        ("liger", "fa3"),
        True,
    )
    assert (settings.rounds, settings.seconds, settings.only) == (10, float("inf"), ())
    items, settings = asked("block", "--shapes", "1x4,2x8", "--modes", "grad", "--strategies", "xla", "--seconds", "9")
    assert (items, settings.preset, settings.strategies) == (["grad 1x4", "grad 2x8"], "llama3-8b", ("xla",))
    assert 0 < settings.until - time.time() <= 9
    assert len(asked("block")[1].strategies) > 4
    items, settings = asked("model", "--preset", "tiny", "--phases", "decode", "--scan", "--layers", "2")
    assert (items, settings.model, settings.layers, settings.is_scanned) == (["decode 8x1024"], "tiny", 2, True)
    assert (settings.strategies, settings.until) == (("xla", "xla_cudnn", "best"), float("inf"))


def test_phases_of_public_models(asked, tmp_path):
    words = ("public", "--checkouts", str(tmp_path), "--models", "gpt2,bert", "--peers", "torch_eager", "--layers", "2")
    items, settings = asked(*words)
    assert items == ["gpt2 forward", "gpt2 train", "bert forward", "bert train"]
    assert (settings.strategies, settings.layers) == (("xla", "fused", "fused_allowed"), 2)
    assert len(asked("public", "--checkouts", str(tmp_path), "--phases", "train")[0]) > 20
    decoded = asked("public", "--checkouts", str(tmp_path), "--phases", "decode")[0]
    assert sorted(decoded) == ["gemma decode", "gpt2 decode", "llama decode", "qwen3 decode"]
    for more, message in {
        ("--models", "bert", "--phases", "decode"): "no model of --models has a phase of --phases",
        ("--models", "gpt3"): "unknown model 'gpt3'; did you mean 'gpt2'",
        ("--phases", "step"): "unknown phase 'step'",
        ("--strategies", "fuse"): "unknown strategy 'fuse'",
        ("--strategies", ""): "--strategies names none",
        ("--peers", "torch"): "unknown peer 'torch'",
        ("--layers", "0"): "Invalid value for '--layers'",
        ("--packages", "/nowhere"): "Invalid value for '--packages'",
    }.items():
        assert message in asked(*words, *more)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("kernels", "--phase", "forwards"), "unknown phase 'forwards'; did you mean 'forward'"),
        (("kernels", "--op", "rope", "--match", "=8x9"), "unknown shape '=8x9'"),
        (("block", "--strategies", "best,xl"), "unknown strategy 'xl'"),
        (("model", "--peers", "liger"), "unknown peer 'liger'"),
        (("block", "--seconds", "soon"), "Invalid value for '--seconds'"),
    ],
)
def test_unknown_names_are_refused(asked, words, message):
    assert message in asked(*words)
