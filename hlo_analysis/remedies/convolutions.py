"""The remedy where one end is a convolution of cuDNN's that there is another way to write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hlo_analysis.patterns.attention_scores import elements
from hlo_analysis.patterns.launch_patterns import convolves, has, only_moves
from hlo_analysis.records import Launch
from hlo_analysis.remedies import conv_texts
from hlo_analysis.remedies.texts import Remedy

# XLA takes so many shifted arrays into one launch; Mamba's and Hyena's convolutions have three or four.
_MOST_TAPS = 8
# Low, high and interior of a dimension; zeros between its elements are the third.
_BETWEEN = re.compile(r"padding=[\dx_\-]*?_-?\d+_[1-9]")


def of_convolutions(producer: Launch, readers: Sequence[Launch]) -> Remedy | None:
    """The remedy where one end is a convolution, None where none is or its neighbours decide."""
    if any(map(_is_short, (producer, *readers))):
        return conv_texts.SHIFTED
    if not all(map(convolves, readers)):
        return _cut(producer, readers)
    if has(producer, "concatenate"):
        return conv_texts.CONVOLVED_PARTS
    if has(producer, "pad") and producer.phase == "forward" and _BETWEEN.search(producer.hlo):
        return conv_texts.SPREAD
    return conv_texts.PADDED if has(producer, "pad") and only_moves(producer) else None


def filter_layout(ends: Sequence[Launch]) -> Remedy:
    """The remedy for images or filters that are transposed: in the order that XLA chose for this type and this GPU."""
    labels = next((found for end in ends if (found := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", end.hlo))), None)
    if labels is None:
        return conv_texts.FILTER_LAYOUT
    axes = "DHW"[-sum(label.isdecimal() for label in labels[1]) :]
    names = str.maketrans({"b": "N", "f": "C", "o": "O", "i": "I", **{str(at): axis for at, axis in enumerate(axes)}})
    numbers = str(tuple(label.translate(names) for label in labels.groups()))
    return replace(conv_texts.FILTER_LAYOUT, text=conv_texts.FILTER_LAYOUT.text.replace(conv_texts.NUMBERS, numbers))


def _cut(producer: Launch, readers: Sequence[Launch]) -> Remedy | None:
    """The remedy for a gradient of which a part is taken: of what was padded on one side more than on the other."""
    is_gradient = producer.phase == "backward" and "__cudnn$convBackwardInput" in producer.hlo
    cuts = all(has(reader, "slice") and only_moves(reader) for reader in readers)
    return conv_texts.PADDED if is_gradient and cuts else None


def _is_short(launch: Launch) -> bool:
    """Whether it convolves each feature alone, along one axis, with a few taps and a stride of one."""
    groups = re.search(r"feature_group_count=(\d+)", launch.hlo)
    taps = re.search(r"window=\{size=(\d+)( pad=[\d_]+)?\}", launch.hlo)
    if not convolves(launch) or not groups or not taps or int(taps[1]) > _MOST_TAPS:
        return False
    return any(elements(value) == int(groups[1]) * int(taps[1]) for value in (*launch.inputs, *launch.outputs))
