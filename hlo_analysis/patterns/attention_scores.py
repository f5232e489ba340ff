"""Finds attention scores in HBM: values that a fused attention kernel would keep on the chip."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import prod

from hlo_analysis.patterns.launch_patterns import has, is_batched, is_product
from hlo_analysis.patterns.pair_patterns import adds_parts
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Intermediate, Value

# Scores of T queries and keys of D features are T / 2D times as large as what they are made from: those of short
# sequences (197 patches, heads of 64) hardly larger, those of a router (8 experts of 1024 features) far smaller.
_GROWTH = 0.5
# A head has at least so many features: the cache that scores are made with is so many times as large.
_FEATURES = 8
_SOFTMAX = {"exponential", "reduce"}


def attention_scores(launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate]) -> frozenset[str]:
    """Names of the scores, of what other launches make of them, and of their gradients.

    Scores are what a product makes that is not much smaller than its operands, where a softmax of it goes into another
    product of its pass. What else is made of them counts as long as it is half their size, until the next product.
    Growth alone is no sign: the gradient of a classifier's hidden layer is larger than what it is made from, too. Nor
    is size: that of a layer four times as wide as its 1024 features has as many elements as the scores of 16 heads and
    256 tokens.
    """
    values: dict[int, list[Intermediate]] = {}
    for value in intermediates:
        values.setdefault(value.producer, []).append(value)
    found: dict[str, int] = {}
    forms: set[tuple[int, int]] = set()
    for value in intermediates:
        launch = launches[value.producer]
        if is_product(launch) or _sums_products(launch, value):
            grown = _has_grown(launch, value)
            is_score = grown and _softmax_meets_a_product(launches, values, value)
            if grown and launch.phase == "backward" and not is_score:
                parted = any(adds_parts(launch, launches[index]) for index in value.consumers)
                is_score = (elements(value), last_size(value)) in forms and not parted
            if is_score:
                forms |= {(elements(value), size) for size in _last_sizes(value)}
        else:
            given = [found[source.name] for source in launch.inputs if source.name in found]
            is_score = bool(given) and 2 * value.bytes >= min(given)
        if is_score:
            found[value.name] = value.bytes
    return frozenset(found)


def attention_products(
    launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate], scores: Collection[str]
) -> frozenset[int]:
    """The products that make scores, and those that read them."""
    ends = {end for value in intermediates if value.name in scores for end in (value.producer, *value.consumers)}
    return frozenset(end for end in ends if is_product(launches[end]))


def _last_sizes(value: Intermediate) -> tuple[int, ...]:
    """Queries and keys of scores: which of them comes last in the gradient's product is XLA's choice."""
    return _sizes(value.shape)[-2:]


def last_size(value: Intermediate | Value) -> int:
    """The last dimension, 1 where there is none."""
    return (1, *_sizes(value.shape))[-1]


def elements(value: Intermediate | Value) -> int:
    """Number of elements, read off the shape's text."""
    return prod(_sizes(value.shape))


@lru_cache(maxsize=1024)
def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(int(size) for size in shape.partition("[")[2].partition("]")[0].split(",") if size.isdecimal())


def _sums_products(launch: LaunchRow, scores: Intermediate) -> bool:
    """Whether a reduction multiplies a cache by a query, or by weights: so XLA makes the products of a single row."""
    if not (has(launch, "multiply") and has(launch, "reduce")) or has(launch, "exponential"):
        return False
    return any(elements(given) >= _FEATURES * elements(scores) for given in launch.inputs)


def _has_grown(product: LaunchRow, value: Intermediate) -> bool:
    """Whether a result is not much smaller than the product's factors.

    A mask or bias of its own size is none of them, nor are the keys of a cache, which a few queries are multiplied by:
    these are larger, and of a batch. What a router multiplies by its weights is large, too, and of none.
    """
    is_alone = bool(product.facts.of("dot")) and not is_batched(product)
    size = elements(value)
    factors = [given for given in product.inputs if elements(given) < size or (is_alone and elements(given) > size)]
    return bool(factors) and value.bytes >= _GROWTH * sum(given.bytes for given in factors)


def _reduces(launches: Sequence[LaunchRow], reader: LaunchRow) -> bool:
    """Whether a launch reduces more than the parts of products whose sum XLA has split."""
    makers = {value.producer for value in reader.inputs if value.producer is not None}
    parted = sum(adds_parts(launches[index], reader) for index in makers)
    return dict(reader.opcodes).get("reduce", 0) > parted


def _softmax_meets_a_product(
    launches: Sequence[LaunchRow], values: Mapping[int, Sequence[Intermediate]], scores: Intermediate
) -> bool:
    """Whether launches of the product's own pass make a softmax of its result that another product reads.

    The softmax of a loss is read by products of the backward pass, too, but what they read was made there.
    """
    phase = launches[scores.producer].phase
    opcodes: set[str] = set()
    meets = False
    queue, seen = [scores], {scores.name}
    while queue:
        for reader in (launches[index] for index in queue.pop().consumers):
            if is_product(reader) or _sums_products(reader, scores):
                meets = True
            elif reader.phase == phase:
                opcodes.update(opcode for opcode, _ in reader.opcodes if opcode != "reduce")
                if _reduces(launches, reader):
                    opcodes.add("reduce")
                new = [value for value in values.get(reader.index, ()) if value.name not in seen]
                large = [value for value in new if 2 * elements(value) >= elements(scores)]
                seen.update(value.name for value in large)
                queue += large
    return meets and opcodes >= _SOFTMAX
