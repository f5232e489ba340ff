"""Has norms return what they normalise, for the residual stream around them.

In the backward pass the stream's cotangent then goes through the norm's kernel, which adds it to its own gradient. XLA
would add the two in a launch of its own, which reads both and writes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from xlafuse.fusion.binding import is_whole
from xlafuse.fusion.graph import Equation, Graph, Value, behind, readers
from xlafuse.fusion.site import NORMS, Site

_SAME = ("reshape", "squeeze", "convert_element_type")


def with_streams(graph: Graph, sites: Sequence[Site], implementation: Callable[[Site], str | None]) -> tuple[Site, ...]:
    """Returns the sites, with a `stream` where a norm's input has other readers and all of them only add it.

    The cotangent of such a reader's result is that of the stream. It needs no work, not even where the norm's input is
    not differentiated.
    """
    owners = {equation: site for site in sites for equation in site.own}

    def streamed(site: Site) -> Site:
        value = _normalised(site)
        if value is None or implementation(site) != "mosaic":
            return site
        outside = (each for each in readers(value, layouts=_SAME) if each is not None and each not in site.covered)
        others = [_only_adds(owners.get(reader), reader, value) for reader in outside]
        is_stream = all(others) and (others or value in graph.outputs)
        return replace(site, stream=value) if is_stream else site

    return tuple(map(streamed, sites))


def _normalised(site: Site) -> Value | None:
    """Returns the input of the site's norm; None without a norm, or if the norm has no scale or adds a residual."""
    is_norm = site.operation in NORMS and "scale" in site.arrays and "residual" not in site.arrays
    has_norm = "norm_scale" in site.arrays and "norm_mean_square" not in site.arrays
    if not (is_norm or has_norm) or not is_whole(site.arrays["x"]):
        return None
    return site.arrays["x"].value


def _only_adds(owner: Site | None, reader: Equation, value: Value) -> bool:
    if owner is None:
        return reader.primitive == "add"
    names = {name for name, binding in owner.arrays.items() if behind(binding.value, _SAME) is behind(value, _SAME)}
    sides = {"x", "residual"} if owner.operation in NORMS and "residual" in owner.arrays else {"residual"}
    return names <= sides
