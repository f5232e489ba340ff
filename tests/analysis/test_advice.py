"""Advice on parts of well-known models: what it names helps there, and nothing else is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from model_parts import model_parts
from programs import NAMES, load

from hlo_analysis import Analysis, analyze, capture
from hlo_analysis.records import MissedFusion
from hlo_analysis.remedies import texts
from xlafuse.catalogue import KERNELS


@pytest.fixture(scope="module")
def advised() -> Callable[[str], Analysis]:
    """`analyze` of a part of a model, with the kernels that xlafuse names."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    parts = model_parts()

    def made(name: str) -> Analysis:
        function, arguments = parts[name]
        return analyze(capture(function, *arguments, target="h200", autotune=None), catalogue=KERNELS)

    return cache(made)


def named(analysis: Analysis, remedy: str) -> list[MissedFusion]:
    return [missed for missed in analysis.missed if remedy in missed.remedy]


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("unet_block", "mamba")), "loss", "loss_again"]
)
def test_no_softmax_before_a_product_is_no_attention(advised: Callable[[str], Analysis], name: str) -> None:
    assert not named(advised(name), "attention:")


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
def test_of_a_layer_with_dropout_attention_alone_is_attention(advised: Callable[[str], Analysis]) -> None:
    found = named(advised("lm1b_layer"), "attention:")
    assert sum(missed.shape.endswith("128,128]") for missed in found) >= 4  # scores, softmax, and gradients of both
    assert {missed.scope for missed in found} == {"attention"}


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("loss", True),
        ("loss_gradient", True),  # where nobody reads the logarithm
        ("loss_30000", False),  # no multiple of 64
        ("loss_float32", False),
        ("loss_biased", False),  # it takes none
        ("loss_shifted", True),  # a bias in front of the product
        ("loss_of_many_tokens", False),  # more than features: XLA was measured to be faster
    ],
)
def test_a_loss_names_the_kernel_that_takes_it(advised: Callable[[str], Analysis], name: str, is_taken: bool) -> None:
    (found,) = named(advised(name), "linear_cross_entropy")
    if is_taken:
        assert found.remedy.startswith("linear_cross_entropy: product and loss in one kernel")
    else:  # the loss alone
        assert found.remedy.startswith("cross_entropy: ")
        assert "linear_cross_entropy does not take this: " in found.remedy


def test_the_bias_of_logits_stays_with_their_product(advised: Callable[[str], Analysis]) -> None:
    """As lm1b's: cross_entropy(x @ w + bias) of 4096 tokens takes 303 µs for 315, and 840 for 1036 with gradients."""
    (found,) = named(advised("loss_biased"), "linear_cross_entropy")
    assert found.kernel == "cross_entropy"
    assert "it takes no bias; XLA adds that of the logits, x @ w + bias, in the product's epilogue" in found.remedy


def test_attention_in_float32_is_told_to_cast(advised: Callable[[str], Analysis]) -> None:
    first = advised("attention_float32").missed[0]
    assert first.remedy.startswith("cast query, key and value to bfloat16 or float16 first")
    assert not named(advised("attention_float32"), "attention:")


def test_few_features_are_not_normalized_by_the_kernel(advised: Callable[[str], Analysis]) -> None:
    assert named(advised("resnet_stem"), "mean and variance of a feature")
    assert not named(advised("resnet_stem"), "batch_norm:")  # 64 features, and a warpgroup shares 128


def test_indices_of_a_max_pooling_are_not_normalized(advised: Callable[[str], Analysis]) -> None:
    """Nor is the gradient that is scattered to them, though the batch norm behind it reads it next."""
    analysis = advised("resnet_stem")
    pooled = [missed for missed in analysis.missed if analysis.launches[missed.producer].kind == "scatter"]
    indices = [missed for missed in analysis.missed if missed.shape.startswith("s32[16,")]
    assert indices
    assert pooled
    assert {missed.remedy for missed in (*indices, *pooled)} == {texts.ONE_KERNEL.named(KERNELS, ()).text}


@pytest.fixture(scope="module")
def of_program() -> Callable[[str], Analysis]:
    """`analyze` of a program of tests/programs."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    return cache(lambda name: analyze(capture(*load(name), target="h200"), catalogue=KERNELS))


@pytest.mark.slow
@pytest.mark.drawn(1 / 17)
@pytest.mark.parametrize("name", NAMES)
def test_no_more_is_at_stake_than_a_program_takes(of_program: Callable[[str], Analysis], name: str) -> None:
    analysis = of_program(name)
    assert analysis.missed
    assert sum(missed.remaining_us for missed in analysis.missed) <= analysis.estimated_us
    for missed in analysis.missed:
        assert bool(missed.options) <= ("compiler_options" in missed.code)
        is_rewrite = missed.kernel in (None, "padded_product")  # which fuse does, and no operation
        assert is_rewrite or f"import {missed.kernel}\n" in missed.code


def test_every_launch_of_a_naive_loop_has_advice(of_program: Callable[[str], Analysis]) -> None:
    """The positions' concatenation, what crosses the loop's boundary, and its counter, too."""
    analysis = of_program("cartpole")
    advised = {end for missed in analysis.missed for end in (missed.producer, *missed.consumers)}
    assert {launch.index for launch in analysis.launches if launch.repeat > 1} <= advised


def test_a_loop_is_worth_what_unrolling_it_by_two_saves(of_program: Callable[[str], Analysis]) -> None:
    counters = [missed for missed in of_program("gru").missed if missed.shape == "s32[]" and missed.remaining_us > 3]
    half = 128 / 2 * of_program("gru").device.efficiency.kernel_us  # there is no gap between launches of a loop
    assert [missed.remaining_us for missed in counters] == [pytest.approx(half, rel=0.01)] * 2
    assert not named(of_program("gru"), texts.KEPT.text)


def norms_of(analysis: Analysis) -> list[MissedFusion]:
    return [missed for missed in analysis.missed if missed.kernel in ("rms_norm", "layer_norm")]


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
def test_a_scan_is_no_norm(advised: Callable[[str], Analysis]) -> None:
    assert not norms_of(advised("mamba"))


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
def test_a_scans_gradient_is_no_norm(of_program: Callable[[str], Analysis]) -> None:
    analysis = of_program("mamba")
    norms = norms_of(analysis)
    assert all(analysis.launches[missed.producer].phase == "forward" for missed in norms)


@pytest.mark.slow
def test_features_of_a_whole_cloud_are_not_joined_to_each_point(of_program: Callable[[str], Analysis]) -> None:
    """Split: 1660 to 958 µs. XLA writes the repeated features in the launch before the one that joins them."""
    (found,) = named(of_program("pointnet"), texts.SPLIT_WEIGHT.text)
    assert found.shape == "bf16[16,4096,1152]"


@pytest.mark.slow
def test_of_a_graph_of_edges_nothing_is_told_apart(of_program: Callable[[str], Analysis]) -> None:
    assert not named(of_program("graphnet"), texts.SPLIT_WEIGHT.text)  # nothing is repeated
