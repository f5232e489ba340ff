"""The model benchmark without a GPU: each phase runs, is checked, and hands its results on, with invented times."""

from __future__ import annotations

import dataclasses

import imitation_torch
import numpy as np
import pytest

from xlafuse.bench import model
from xlafuse.bench.model import PHASES, bench_model
from xlafuse.bench.settings import ModelSettings
from xlafuse.models import BlockConfig
from xlafuse.models.decoder import PRESETS, Decoder, DecoderConfig
from xlafuse.strategies import Strategy

SETTINGS = ModelSettings(model="tiny", strategies=("xla", "other"), layers=1, rounds=1, calls=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(model, "get_strategy", lambda name: Strategy(name=name, description="", fuses=name == "other"))
    monkeypatch.setattr(model, "_ROOM", 8)


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
@pytest.mark.usefixtures("invented_times")
@pytest.mark.parametrize("is_scanned", [False, True])
def test_every_phase_is_measured(is_scanned):
    phases = ("train", "decode") if is_scanned else PHASES
    settings = dataclasses.replace(SETTINGS, is_scanned=is_scanned)
    measured = [result for phase in phases for result in bench_model(f"{phase} 2x8", settings)]
    results = [result for result in measured if not isinstance(result, str)]
    assert [result.phase for result in results] == list(phases)
    for result in results:
        assert result.problems == ()
        assert [each.name for each in result.candidates] == ["xla", "other"]
        first = result.candidates[0]
        assert first.compile_seconds > 0
        assert first.peak_bytes > result.bytes
        tokens = 2 if result.phase == "decode" else 16
        assert first.tokens_per_second == pytest.approx(tokens / first.timing.wall_us * 1e6)


SMALL = BlockConfig(
    name="small", hidden_size=32, mlp_size=48, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32",
    param_dtype="float32",
)  # fmt: skip
LLAMA = DecoderConfig(block=SMALL, layers=2, vocabulary=64)
GPT = DecoderConfig(
    block=dataclasses.replace(SMALL, num_kv_heads=4, norm="layer_norm", mlp="gelu", rope_theta=None, use_bias=True),
    layers=2,
    vocabulary=64,
    learned_positions=32,
)
SCANNED = dataclasses.replace(LLAMA, is_scanned=True)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    ("config", "phase"),
    [
        *[
            pytest.param(config, phase, id=f"{phase}-{name}")
            for name, config in {"llama": LLAMA, "gpt": GPT}.items()
            for phase in ("forward", "train", "decode")
        ],
        # Its weights are stacked.
        *[pytest.param(SCANNED, phase, id=f"{phase}-scan") for phase in ("train", "decode")],
    ],
)
def test_pytorchs_model_is_ours(config, phase, monkeypatch):
    imitation_torch.install(monkeypatch)
    from xlafuse.bench.peers import torch_model

    chain = model._chain(config, "2x5", phase, seed=0)
    if phase == "train":
        params, _, drawn = chain.arguments
        expected = [Decoder(config).loss(params, drawn)]
    else:
        step = Decoder(config).step if phase == "decode" else Decoder(config).logits
        expected = model._summary(phase, step(*chain.arguments))
    state = torch_model.shared_state(config, phase, chain.arguments, room=3)
    for name in ("torch_eager", "torch_reduce_overhead"):
        candidate, found = torch_model.candidate(name, config, phase, chain.arguments, state)
        assert (candidate.name, candidate.kind, candidate.costs["peak_bytes"]) == (name, "peer", 7)
        assert (candidate.costs["compile_seconds"] > 0) == (name != "torch_eager")
        for ours, theirs in zip(expected, found, strict=True):
            np.testing.assert_allclose(theirs, ours, atol=2e-4)
        positions = []
        for _ in range(3):
            positions.append(int(state.positions[-1]))
            candidate.call()
        # Decoding appends tokens, and begins again where there is no room.
        assert positions == ([6, 7, 5] if phase == "decode" else [4, 4, 4])


@pytest.mark.slow
@pytest.mark.usefixtures("invented_times")
def test_peers_take_turns_with_the_strategies(monkeypatch):
    imitation_torch.install(monkeypatch)
    monkeypatch.setitem(PRESETS, "small", GPT)
    settings = dataclasses.replace(SETTINGS, model="small", strategies=(), peers=("torch_compile",), layers=2)
    for result in (r for phase in ("forward", "train", "decode") for r in bench_model(f"{phase} 1x8", settings)):
        assert not isinstance(result, str)
        assert result.problems == ()
        assert [(each.name, each.kind) for each in result.candidates] == [
            ("xla", "strategy"),
            ("torch_compile", "peer"),
        ]
        assert result.candidates[1].peak_bytes == 7


@pytest.mark.usefixtures("invented_times")
def test_a_wrong_strategy_is_a_problem_and_no_time(monkeypatch):
    right = model._compiled

    def compiled(strategy, *rest):
        step, costs = right(strategy, *rest)
        return (step if strategy == "xla" else lambda *arguments: 2 * step(*arguments)), costs

    monkeypatch.setattr(model, "_compiled", compiled)
    (result,) = bench_model("forward 1x8", SETTINGS)
    assert [each.name for each in result.candidates] == ["xla"]
    assert "off by 1" in result.problems[0].message


def test_more_positions_than_the_model_has_are_refused():
    (told,) = bench_model("decode 8x1024", dataclasses.replace(SETTINGS, model="gpt2-medium"))
    assert "1032 positions are needed, and the model has 1024" in told


def test_no_time_left_is_told():
    assert list(bench_model("decode 1x8", dataclasses.replace(SETTINGS, until=0.0))) == [
        "tiny decode 1x8: not begun, the time was up"
    ]
