"""Finds attention scores in HBM: values that a fused attention kernel would keep on the chip."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from hlo_analysis.patterns.launch_patterns import has, is_batched, is_product, shape_of
from hlo_analysis.patterns.softmax_stages import Flow, Stage, follow
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Intermediate, Value

# Scores of T queries and keys of D features are T / 2D times as large as what they are made from: those of short
# sequences (197 patches, heads of 64) hardly larger, those of a router (8 experts of 1024 features) far smaller.
_GROWTH = 0.5
# A head has at least so many features: the cache that scores are made with is so many times as large.
_FEATURES = 8
# So many launches at most lie between scores and their product: 16 do, unfused with soft cap, bias, mask and dropout.
# A residual stream looks like scores and passes all layers, so that the search needs an end to take linear time.
_FARTHEST = 24


def attention_scores(launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate]) -> frozenset[str]:
    """Names of the scores, of what other launches make of them, and of their gradients.

    Scores are what a product makes that is not much smaller than its operands, where exponentials of them, less a
    number for each row, are added up and go into another product, scaled and not added to anything.
    The softmax of a loss has the label subtracted before a product reads it; sigmoids and decays have no row's number.
    The gradient of scores is a product of their size that is put together with them.
    """
    values: dict[int, list[Intermediate]] = {}
    for value in intermediates:
        values.setdefault(value.producer, []).append(value)
    makes = {launch.index for launch in launches if is_product(launch)}

    @cache  # a launch of the residual stream is met from the products of many layers
    def flow_of(index: int, given: frozenset[tuple[str, Stage]]) -> Flow:
        return follow(launches[index].facts, dict(given))

    found: dict[str, int] = {}
    for value in intermediates:
        launch = launches[value.producer]
        if (launch.index in makes or _sums_products(launch, value)) and _has_grown(launch, value):
            found |= _softmax_for_product(launches, values, value, flow_of)
    for value in intermediates:
        launch = launches[value.producer]
        if launch.index in makes:
            is_score = launch.phase == "backward" and _joins(launches, values, value, found)
        else:
            is_score = any(2 * elements(value) >= found[given.name] for given in launch.inputs if given.name in found)
        if is_score:
            found[value.name] = elements(value)
    return frozenset(found)


def attention_products(
    launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate], scores: Collection[str]
) -> frozenset[int]:
    """The products that make scores, and those that read them."""
    ends = {end for value in intermediates if value.name in scores for end in (value.producer, *value.consumers)}
    return frozenset(end for end in ends if is_product(launches[end]))


def last_size(value: Intermediate | Value) -> int:
    """The last dimension, 1 where there is none."""
    return (1, *shape_of(value.shape).dimensions)[-1]


def elements(value: Intermediate | Value) -> int:
    """Number of elements, read off the shape's text."""
    return shape_of(value.shape).element_count


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


def _joins(
    launches: Sequence[LaunchRow],
    values: Mapping[int, Sequence[Intermediate]],
    product: Intermediate,
    scores: Mapping[str, int],
) -> bool:
    """Whether what a product makes is put together with scores, as large at least, before the next product."""
    queue, seen = [product], {product.name}
    while queue:
        for reader in (launches[index] for index in queue.pop().consumers):
            if is_product(reader):
                continue
            if any(scores.get(given.name, 0) >= elements(product) for given in reader.inputs):
                return True
            new = [made for made in values.get(reader.index, ()) if made.name not in seen]
            large = [made for made in new if 2 * elements(made) >= elements(product)]
            seen.update(made.name for made in large)
            queue += large
    return False


def _softmax_for_product(
    launches: Sequence[LaunchRow],
    values: Mapping[int, Sequence[Intermediate]],
    scores: Intermediate,
    flow_of: Callable[[int, frozenset[tuple[str, Stage]]], Flow],
) -> Mapping[str, int]:
    """Scores and what a softmax makes of them, with their elements; none where no product reads it."""
    size = elements(scores)
    stages, sizes = {scores.name: Stage.SCORE}, {scores.name: size}
    sums = meets = False
    queue = [(scores, 0)]
    while queue:
        value, passed = queue.pop()
        if passed == _FARTHEST:
            continue
        for reader in (launches[index] for index in value.consumers):
            given = {value.name for value in reader.inputs} & stages.keys()
            flow = flow_of(reader.index, frozenset((name, stages[name]) for name in given))
            sums |= flow.sums
            if is_product(reader) or _sums_products(reader, scores):
                meets |= flow.stage is Stage.PROBABILITY
                continue
            for made in values.get(reader.index, ()):
                if flow.result and 2 * elements(made) >= size and flow.result > stages.get(made.name, 0):
                    stages[made.name], sizes[made.name] = flow.result, elements(made)
                    queue.append((made, passed + 1))
    return sizes if sums and meets else {}
