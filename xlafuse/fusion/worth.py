"""Leaves to XLA what a kernel of its own would make slower.

XLA fuses operations on rows and elements with their neighbours. A kernel there reads an array that XLA computes on the
way, or writes one that XLA uses on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from pallas_kernels.primitives.platform import target_device
from xlafuse.fusion.binding import Binding
from xlafuse.fusion.graph import LAYOUTS, Equation, Graph, Value, is_free
from xlafuse.fusion.site import Refusal, Site
from xlafuse.fusion.terms import ELEMENTWISE

_STREAMING = frozenset(("rms_norm", "layer_norm", "softmax", "bias_activation", "gated_activation"))
"""Operations that take as long as it takes to read and write their arrays."""
_READING = _STREAMING | {"cross_entropy"}
"""Those that read large arrays."""
_WITH_EPILOGUE = ("dot_general", "conv_general_dilated")
_FUSIBLE = ELEMENTWISE | {"add", "sub", "mul", "div", "square", "integer_pow", "rsqrt", "custom_jvp_call"}


def worthwhile(
    graph: Graph, sites: Sequence[Site], implementation: Callable[[Site], str | None], *, keeps_all: bool
) -> tuple[list[Site], list[Site], list[Refusal]]:
    """Returns the sites to call an operation at, those to leave as they are written, and refusals.

    A site whose operation would run by XLA stays as it is written. On a CPU all sites are called, and run by XLA.

    implementation: returns what the operation of a site takes. keeps_all: calls kernels also where XLA fuses more.
    """
    if target_device().platform == "cpu":
        return list(sites), [], []
    called = [site for site in sites if implementation(site) != "xla"]
    written = [site for site in sites if site not in called]
    refused: list[Refusal] = []
    changes = not keeps_all
    while changes:
        changes = False
        for site in [each for each in called if each.operation in _READING]:
            reason = _Neighbours(graph, called).reason(site)
            if reason is not None:
                called.remove(site)
                value, covered = site.results[0], site.covered | site.shared
                refused.append(Refusal(operation=site.operation, value=value, reason=reason, covered=covered))
                changes = True
    return called, written, refused


class _Neighbours:
    """What is around the sites of a graph."""

    def __init__(self, graph: Graph, called: Sequence[Site]):
        self._returned = set(graph.outputs)
        self._owners = {equation: site for site in called for equation in site.covered if not is_free(equation)}

    def reason(self, site: Site) -> str | None:
        """Returns why XLA should compute a site, or None."""
        producer = _without_layouts(site.arrays["x"].value) if site.operation == "bias_activation" else None
        if producer is not None and producer.primitive in _WITH_EPILOGUE:
            return f"XLA does it in the epilogue of {producer.primitive}; a kernel would write and read x once more"
        if site.operation == "gated_activation" and self._is_of_one_product(site):
            return "XLA may make one product of gate and up; a kernel would then need a copy of each"
        largest = max(math.prod(binding.shape) for binding in site.arrays.values())
        for name, binding in site.arrays.items():
            producer = self._fusible_producer(binding.value)
            is_large = 2 * math.prod(binding.value.shape) >= largest
            if is_large and _is_sliced(binding):
                return f"XLA fuses it with the slice that {name} is; a kernel would need a copy of that"
            if producer is not None and is_large and self._readers(producer.outputs[0]) <= site.covered:
                return (
                    f"XLA fuses it with {producer.primitive}, which computes {name}; a kernel would read {name} again"
                )
        if site.operation not in _STREAMING:
            return None
        readers = self._readers(site.results[0])
        if site.results[0] not in self._returned and readers and all(map(self._is_fusible, readers)):
            names = ", ".join(sorted({each.primitive for each in readers}))
            return f"XLA fuses it with what reads its result ({names}); a kernel would write the result once more"
        return None

    def _is_of_one_product(self, site: Site) -> bool:
        """Returns whether gate and up are products of one array, outside the sites; XLA joins small ones."""
        producers = [_without_layouts(site.arrays[name].value).equation for name in ("gate", "up")]
        products = [each for each in producers if each is not None and each.primitive == "dot_general"]
        if len(products) < 2 or any(each in self._owners for each in products):
            return False
        first, second = (set(each.inputs) for each in products)
        return not first.isdisjoint(second)

    def _fusible_producer(self, value: Value) -> Equation | None:
        """Returns the elementwise equation outside the sites that computes a value, in any layout."""
        value = _without_layouts(value)
        producer = value.equation
        is_outside = producer is not None and producer not in self._owners and not producer.is_constant
        return producer if is_outside and value.primitive in _FUSIBLE and value not in self._returned else None

    def _readers(self, value: Value) -> set[Equation]:
        """Returns the equations that read a value, directly or through reshapes and transposes."""
        return set(self._each_reader(value))

    def _each_reader(self, value: Value) -> Iterator[Equation]:
        for user in value.users:
            if user.primitive in LAYOUTS and not any(each in self._returned for each in user.outputs):
                for each in user.outputs:
                    yield from self._each_reader(each)
            else:
                yield user

    def _is_fusible(self, reader: Equation) -> bool:
        owner = self._owners.get(reader)
        return owner.operation in _STREAMING if owner is not None else reader.primitive in _FUSIBLE


def _is_sliced(binding: Binding) -> bool:
    """Returns whether an argument is a part of a larger array."""
    whole = all((start, step, size or 1) == (0, 1, length) for (start, step, size), length in _places(binding))
    value = binding.value
    while whole and value.primitive in LAYOUTS and value.equation is not None:
        whole = value.primitive not in ("slice", "split")
        value = value.equation.inputs[0]
    return not whole


def _places(binding: Binding) -> Iterator[tuple[tuple[int, int, int], int]]:
    return zip(binding.places, binding.value.shape, strict=True)


def _without_layouts(value: Value) -> Value:
    """Returns the value that another one is a layout of."""
    while value.primitive in LAYOUTS and value.equation is not None:
        value = value.equation.inputs[0]
    return value
