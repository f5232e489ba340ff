"""Chooses the remedy next to a cuDNN convolution that can be written in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hlo_analysis.hlo.attributes import convolution_labels, integers, interior_padding, window, window_size
from hlo_analysis.patterns.attention_scores import elements
from hlo_analysis.patterns.launch_patterns import convolves
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies import texts
from hlo_analysis.remedies.texts import Remedy

# XLA takes so many shifted arrays into one launch; Mamba's and Hyena's convolutions have three or four.
_MOST_TAPS = 8


def of_convolutions(producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy where one end is a convolution, None where none is or its neighbours decide."""
    if any(map(is_short_depthwise, (producer, *readers))):
        return texts.SHIFTED
    if not all(map(convolves, readers)):
        return None
    return texts.SPREAD if producer.phase == "forward" and _spreads_out(producer) else None


def filter_layout(ends: Sequence[LaunchRow]) -> Remedy:
    """The remedy for images or filters that are transposed: in the order that XLA chose for this type and this GPU."""
    calls = [found for end in ends for found in end.facts.instructions.values()]
    labels = next((found for call in calls if (found := convolution_labels(call))), None)
    if labels is None:
        return texts.FILTER_LAYOUT
    axes = "DHW"[-sum(label.isdecimal() for label in labels[0]) :]
    names = str.maketrans({"b": "N", "f": "C", "o": "O", "i": "I", **{str(at): axis for at, axis in enumerate(axes)}})
    numbers = str(tuple(label.translate(names) for label in labels))
    return replace(texts.FILTER_LAYOUT, text=texts.FILTER_LAYOUT.text.replace(texts.CONVOLUTION_NUMBERS, numbers))


def is_short_depthwise(launch: LaunchRow) -> bool:
    """Whether it convolves each feature alone, along one axis, with a few taps and a stride of one."""
    for call in launch.facts.of("custom-call") if convolves(launch) else ():
        groups, taps = integers(call, "feature_group_count"), window_size(call)
        if groups and len(taps) == 1 and taps[0] <= _MOST_TAPS and window(call).keys() <= {"size", "pad"}:
            return any(elements(value) == groups[0] * taps[0] for value in (*launch.inputs, *launch.outputs))
    return False


def _spreads_out(launch: LaunchRow) -> bool:
    """Whether it puts zeros between elements."""
    return any(max(interior_padding(found)) > 0 for found in launch.facts.of("pad"))
