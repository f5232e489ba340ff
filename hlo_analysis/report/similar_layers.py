"""Groups the repetitions in a deep model: missed fusions of similar layers, and similar layers in the scope table."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any

from hlo_analysis.records import Analysis, MissedFusion

_NUMBER = re.compile(r"\d+")
_LAYER_NUMBER = re.compile(r"(^|[/_])\d+(?=/|$)")
_NUMBERED = re.compile(r"(?![A-Z][^_]*$)[^:]*\d")
"""A part of a scope that is one of several. 'GPT2' is a model's name."""
# Two similar layers take no more space than the line that would replace the second.
_FEWEST = 3


def without_numbers(name: str) -> str:
    """Replaces each number in the name by '*': 'layer_12/mlp' → 'layer_*/mlp'."""
    return _NUMBER.sub("*", name)


def without_layer_numbers(scope: str) -> str:
    """Replaces the numbers of layers alone by '*': 'GPT2/layer_12/mlp' → 'GPT2/layer_*/mlp'."""
    return _LAYER_NUMBER.sub(r"\1*", scope)


def group_missed(analysis: Analysis) -> list[tuple[MissedFusion, ...]]:
    """Groups missed fusions that differ only in names and numbers, the costliest group first."""
    groups: dict[Hashable, list[MissedFusion]] = {}
    for item in analysis.missed:
        ends = [analysis.launches[index] for index in (item.producer, *item.consumers)]
        where = tuple((end.kind, end.source, without_numbers(end.scope), end.repeat) for end in ends)
        key = (item.shape, item.bytes_at_stake, item.remedy, without_numbers(item.reason), where)
        groups.setdefault(key, []).append(item)
    return sorted(map(tuple, groups.values()), key=lambda group: -sum(item.remaining_us for item in group))


def fold_layers[Row](
    rows: Iterable[Row], scope_of: Callable[[Row], tuple[str, str]], signature_of: Callable[[Row], Any]
) -> list[Row | tuple[str, str, int]]:
    """Replaces the rows of layers that equal the layer before by (first name, last name, count).

    Args:
        rows: in program order.
        scope_of: returns a row's scope and phase. A layer is everything under one numbered name, as 'model/layer_3'.
        signature_of: returns a value that is equal for the rows of equal layers.
    """
    layers = [(key, list(found)) for key, found in groupby(rows, key=lambda row: layer_of(*scope_of(row)))]

    def alike(layer: tuple[tuple[str, str], list[Row]]) -> Hashable:
        (name, phase), found = layer
        if not name:
            return (id(layer),)
        parts = [(scope_of(row)[0].removeprefix(name), signature_of(row)) for row in found]
        return (without_numbers(name), phase, repr(parts))

    folded: list[Row | tuple[str, str, int]] = []
    for _, run in groupby(layers, key=alike):
        (first, *rest) = list(run)
        folded += first[1]
        if len(rest) + 1 >= _FEWEST:
            folded.append((rest[0][0][0], rest[-1][0][0], len(rest)))
        else:
            folded += [row for _, found in rest for row in found]
    return folded


def layer_of(scope: str, phase: str) -> tuple[str, str]:
    """Returns the scope up to its first part that ends in a number ('' if there is none), and the phase.

    A source line, such as 'model.py:12', is no layer.
    """
    parts: Sequence[str] = scope.split("/")
    place = next((place for place, part in enumerate(parts, start=1) if _NUMBERED.fullmatch(part)), 0)
    return "/".join(parts[:place]), phase
