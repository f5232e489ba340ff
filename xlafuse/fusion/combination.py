"""The sites of a graph while rules combine them: which they are, who reads whose results, and what kernels take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pallas_kernels.primitives.platform import target_device
from xlafuse.fusion.binding import Binding, is_permuted, is_whole
from xlafuse.fusion.graph import Equation, Graph, Value, behind, readers
from xlafuse.fusion.site import Site, implementation_of, structs_of
from xlafuse.fusion.spellings import OPERATIONS, Choices
from xlafuse.fusion.worth import copies_more

PRODUCTS = ("linear", "gated_linear", "qkv_projection")


class Combination:
    """The sites of a graph while rules combine them.

    choices: the operations that may be called. judges: whether it leaves to XLA what XLA computes best. returned: the
    graph's outputs. owners: the site that an equation is part of.
    """

    def __init__(self, graph: Graph, sites: Sequence[Site], choices: Choices):
        self.choices = choices
        self.judges = choices.ops is None and target_device().is_hopper
        self.returned = set(graph.outputs)
        self._implementations: dict[Any, str | None] = {}
        self._producers: dict[Value, Site] = {}
        self.owners: dict[Equation, Site] = {}
        self._sites: dict[int, Site] = {}
        for site in sites:
            self._add(site)

    def __contains__(self, site: Site) -> bool:
        """Returns whether a site is still one."""
        return id(site) in self._sites

    @property
    def sites(self) -> list[Site]:
        """Returns the sites as they are now."""
        return list(self._sites.values())

    def drop_copying(self) -> list[Site]:
        """Drops the products whose kernels would copy more than they save, and returns them."""
        products = [site for site in self.sites if self.judges and site.operation in PRODUCTS]
        dropped = [site for site in products if self.implementation(site) != "xla" and copies_more(site)]
        self.replace(dropped, [])
        return dropped

    def _add(self, site: Site) -> None:
        self._sites[id(site)] = site
        self._producers |= dict.fromkeys(site.results, site)
        self.owners |= dict.fromkeys(site.own, site)

    def replace(self, old: Iterable[Site], new: Iterable[Site]) -> None:
        """Puts new sites in the place of old ones."""
        for site in old:
            del self._sites[id(site)]
            for value in site.results:
                self._producers.pop(value, None)
        for site in new:
            self._add(site)

    def accepts(self, new: Site, old: Sequence[Site]) -> bool:
        """Returns whether the larger operation runs, and leaves nothing to XLA that its parts would not."""
        implementation = self.implementation(new)
        if implementation is None or (self.judges and copies_more(new)):
            return False
        parts = (self.implementation(site) for site in old if site.operation not in OPERATIONS)
        return implementation != "xla" or all(part == "xla" for part in parts)

    def implementation(self, site: Site) -> str | None:
        """Returns the implementation that a site's operation takes; None where it refuses the arguments."""
        structs = structs_of(site).items()
        arrays = tuple((name, each.shape, each.dtype, each.sharding) for name, each in structs)
        key = (site.operation, arrays, repr(sorted(site.options.items())), repr(site.prepare))
        if key not in self._implementations:
            self._implementations[key] = implementation_of(site)
        return self._implementations[key]

    def producer_of(self, binding: Binding) -> Site | None:
        """Returns the site whose first result an argument is, possibly reshaped; None for a transposed result."""
        if not is_whole(binding):
            return None
        value = behind(binding.value, ("reshape",), self._producers)
        producer = self._producers.get(value)
        is_given = producer is not None and producer.results[0] is value and not is_permuted(producer.orders[0])
        return producer if is_given else None

    def origin(self, value: Value) -> Site | None:
        """Returns the site that computes a value, up to its layout; None if none does."""
        return self._producers.get(behind(value, ends=self._producers))

    def readers(self, value: Value) -> set[Site | None]:
        """Returns the sites that read a value; None stands for other readers."""
        found = readers(value, self.returned)
        return {None if each is None else self.owners.get(each) for each in found}

    def feeds_only(self, value: Value, readers: Collection[Site]) -> bool:
        """Returns whether only some sites read a value."""
        return self.readers(value) <= set(readers)
