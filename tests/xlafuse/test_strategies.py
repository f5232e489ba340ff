"""The registry of strategies, and when each can be used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from xlafuse import strategies
from xlafuse.errors import UnknownNameError
from xlafuse.strategies import STRATEGIES, Strategy, get_strategy, resolve_strategies

HERE = {"is_block": True, "kind": "cuda", "compute_capability": (9, 0)}


@pytest.fixture(autouse=True)
def _everything_installed(monkeypatch):
    monkeypatch.setattr(strategies, "find_spec", lambda _: object())


def test_registry_holds_the_strategies_by_their_names():
    assert list(STRATEGIES) == [
        "unfused",
        "xla",
        "xla_cublas",
        "xla_dot_merger",
        "xla_gemm_v2",
        "xla_cudnn",
        "pallas",
        "pallas_cudnn",
        "triton",
        "best",
        "pallas_overlap",
        "fused",
    ]
    assert all(name == strategy.name for name, strategy in STRATEGIES.items())
    assert len({strategy.description for strategy in STRATEGIES.values()}) == len(STRATEGIES)


def test_xla_is_the_program_as_it_comes():
    assert get_strategy("xla") == Strategy(name="xla", description=STRATEGIES["xla"].description)


def test_unknown_strategy_names_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown strategy 'palas'; did you mean 'pallas'") as caught:
        get_strategy("palas")
    assert caught.value.nearest[0] == "pallas"
    with pytest.raises(UnknownNameError, match=r"Known: unfused, xla, .*pallas"):
        get_strategy("something else entirely")


def test_strategies_resolve_in_order_and_once():
    mine = Strategy(name="mine", description="A strategy of the caller's own.")
    assert [s.name for s in resolve_strategies(["pallas", mine, "xla", "pallas"])] == ["pallas", "mine", "xla"]
    assert resolve_strategies(None) == tuple(each for each in STRATEGIES.values() if each.name != "pallas_overlap")


def test_triton_is_left_out_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(strategies, "find_spec", lambda _: None)
    left_out = set(STRATEGIES) - {s.name for s in resolve_strategies(None)}
    assert left_out == {"triton", "pallas_overlap"}
    assert "pip install 'xlafuse[triton]'" in str(get_strategy("triton").unmet(**HERE))


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_can_be_used_for_a_block_on_hopper(name):
    assert get_strategy(name).unmet(**HERE) is None


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"is_block": False}, {"xla_cudnn", "pallas", "pallas_cudnn", "triton", "best", "pallas_overlap"}),
        ({"kind": "cpu", "compute_capability": (0, 0)}, set(STRATEGIES) - {"xla"}),
        ({"compute_capability": (8, 0)}, {"pallas", "pallas_cudnn", "best", "pallas_overlap", "fused"}),
        ({"compute_capability": (10, 0)}, {"pallas", "pallas_cudnn", "best", "pallas_overlap", "fused"}),
        ({"kind": "attached", "compute_capability": (0, 0)}, set()),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(changed, refused):
    reasons = {name: strategy.unmet(**HERE | changed) for name, strategy in STRATEGIES.items()}
    assert {name for name, reason in reasons.items() if reason} == refused
    for name in refused:
        assert f"'{name}'" in reasons[name]


def test_overlapping_products_travel_by_copies():
    from pallas_kernels import BY_COPY_ENGINES

    assert get_strategy("pallas_overlap").compiler_options.items() >= BY_COPY_ENGINES.items()


def test_plan_strategies_tell_a_plain_function_which_sites_they_would_need():
    reason = get_strategy("pallas").unmet(**HERE | {"is_block": False})
    assert reason is not None
    assert "attention_norm=mosaic, qkv_projection=mosaic, attention=mosaic, output_" in reason


def test_importing_the_package_or_the_registry_brings_no_jax():
    script = (
        "import sys, xlafuse; assert 'jax' not in sys.modules, 'jax'; assert 'compare' in dir(xlafuse);"
        "assert xlafuse.UnknownNameError; assert 'jax' not in sys.modules, 'errors'"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_misspelt_attribute_is_an_attribute_error():
    import xlafuse

    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        _ = xlafuse.compere
