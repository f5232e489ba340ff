"""Combines sites to larger ones, where one operation does in one call what others do one after the other.

An operation such as `norm_linear` is defined as one operation after another, so that sites of both, the one's result
being the other's argument and nobody else's, are a site of it. Where the larger operation would leave the work to XLA
and one of its parts would not, the parts stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.primitives.platform import target_device
from xlafuse.fusion.binding import Binding, is_permuted, is_whole, order_of
from xlafuse.fusion.dropout import is_dropped
from xlafuse.fusion.graph import LAYOUTS, Equation, Graph, Value, behind
from xlafuse.fusion.odd_sizes import NAME as PADDED
from xlafuse.fusion.prepare import Normed, of_hidden, with_positions, with_weight
from xlafuse.fusion.projection import project
from xlafuse.fusion.schedule import is_acyclic
from xlafuse.fusion.site import Refusal, Site, implementation_of
from xlafuse.fusion.streams import with_streams
from xlafuse.fusion.worth import COPIES, copies_more, with_gradients_only, worthwhile

_PRODUCTS = ("linear", "gated_linear", "qkv_projection")
_NORMS = ("rms_norm", "layer_norm")
_PARTS = ("rotation", "dequantized")
_ALONE = "one array is rotated at a time, and rope rotates query and key together"
_DRAWN = "the operation draws its mask by a generator of its own, and other elements than the program's would be zero"


def combined(
    graph: Graph, sites: Sequence[Site], ops: Collection[str] | None, skip: Collection[str] = ()
) -> tuple[tuple[Site, ...], tuple[Site, ...], list[Refusal]]:
    """Combines sites and drops parts and unwanted operations.

    Returns the sites, those that stay as they are written, and what was refused.
    """
    combination = Combination(graph, sites, ops, skip)
    copying = combination.drop_copying()
    combination.run()
    together = combination.sites
    if not is_acyclic(graph, together):
        together = list(sites)
    refused = [
        Refusal(operation="rope", value=site.results[0], reason=_ALONE)
        for site in together
        if site.operation == "rotation"
    ]
    refused += [
        Refusal(operation=site.operation, value=site.results[0], reason=COPIES, covered=site.covered)
        for site in copying
    ]
    refused += [
        Refusal(operation="dropout_residual_norm", value=site.results[0], reason=_DRAWN)
        for site in together
        if site.operation in _NORMS and any(is_dropped(binding.value) for binding in site.arrays.values())
    ]
    wanted = [site for site in together if site.operation not in _PARTS and combination.is_wanted(site.operation)]
    options = {"keeps_all": ops is not None, "pads": combination.is_wanted(PADDED)}
    called, written, more = worthwhile(graph, wanted, combination.implementation, **options)
    called = with_streams(graph, called, combination.implementation)
    if combination.judges:
        called = with_gradients_only(graph, called)
    return called, tuple(written), [*refused, *more]


class Combination:
    """The sites of a graph while rules combine them."""

    def __init__(self, graph: Graph, sites: Sequence[Site], ops: Collection[str] | None, skip: Collection[str]):
        self._ops = ops
        self._skip = skip
        self.judges = ops is None and target_device().is_hopper
        self._returned = set(graph.outputs)
        self._implementations: dict[Any, str | None] = {}
        self._producers: dict[Value, Site] = {}
        self._owners: dict[Equation, Site] = {}
        self._sites: dict[int, Site] = {}
        for site in sites:
            self._add(site)

    @property
    def sites(self) -> list[Site]:
        """Returns the sites as they are now."""
        return list(self._sites.values())

    def drop_copying(self) -> list[Site]:
        """Drops the products whose kernels would copy more than they save, and returns them."""
        products = [site for site in self.sites if self.judges and site.operation in _PRODUCTS]
        dropped = [site for site in products if self.implementation(site) != "xla" and copies_more(site)]
        self.replace(dropped, [])
        return dropped

    def run(self) -> None:
        """Applies the rules, one after the other."""
        for name, rule in (
            ("cross_entropy", self._sum_losses),
            ("quantized_linear", self._quantize),
            ("rope", self._pair),
            ("linear", self._add_before_norms),
            ("qkv_projection", partial(project, self)),
            ("linear_residual_norm", self._give_mean_squares),
            ("linear_cross_entropy", self._take_logits),
            (None, self._normalize),
        ):
            if name is None or self.is_wanted(name):
                for site in self.sites:
                    if id(site) in self._sites:
                        rule(site)

    def is_wanted(self, operation: str) -> bool:
        """Returns whether an operation may be called."""
        return (self._ops is None or operation in self._ops) and operation not in self._skip

    def _add(self, site: Site) -> None:
        self._sites[id(site)] = site
        self._producers |= dict.fromkeys(site.results, site)
        self._owners |= dict.fromkeys(site.own, site)

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
        parts = (self.implementation(site) for site in old if site.operation not in _PARTS)
        return implementation != "xla" or all(part == "xla" for part in parts)

    def implementation(self, site: Site) -> str | None:
        """Returns the implementation that a site's operation takes; None where it refuses the arguments."""
        arrays = tuple((name, each.shape, each.missing, str(each.value.dtype)) for name, each in site.arrays.items())
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
        """Returns the site that a value comes from, in any layout."""
        return self._producers.get(behind(value, ends=self._producers))

    def readers(self, value: Value) -> set[Site | None]:
        """Returns the sites that read a value; None stands for other readers."""
        found: set[Site | None] = {None} if value in self._returned else set()
        for user in value.users:
            if user.primitive in LAYOUTS:
                for output in user.outputs:
                    found |= self.readers(output)
            else:
                found.add(self._owners.get(user))
        return found

    def _feeds_only(self, value: Value, readers: Collection[Site]) -> bool:
        return self.readers(value) <= set(readers)

    # Each of the rules looks at one site.

    def _sum_losses(self, loss: Site) -> None:
        if loss.operation != "cross_entropy" or "reduction" in loss.options or len(loss.results[0].shape) == 0:
            return
        value = loss.results[0]
        skipped: list[Equation] = []
        while (
            value not in self._returned and len(value.users) == 1 and value.users[0].primitive in ("reshape", "squeeze")
        ):
            skipped.append(value.users[0])
            value = value.users[0].outputs[0]
        if value in self._returned or len(value.users) != 1:
            return
        (user,) = value.users
        if user.primitive != "reduce_sum" or len(user.params["axes"]) != len(value.shape) or user in self._owners:
            return
        total = replace(
            loss,
            results=(user.outputs[0],),
            orders=((),),
            options={**loss.options, "reduction": "sum"},
            covered=loss.covered | {user, *skipped},
        )
        if self.accepts(total, [loss]):
            self.replace([loss], [total])

    def _quantize(self, product: Site) -> None:
        if product.operation != "linear":
            return
        w = product.arrays["w"]
        weight = self.origin(w.value)
        if weight is None or weight.operation != "dequantized" or w.value is not weight.results[0]:
            return
        if order_of(w) != weight.orders[0] or not self._feeds_only(w.value, [product]):
            return
        arrays = {name: each for name, each in product.arrays.items() if name != "w"} | dict(weight.arrays)
        new = replace(
            product,
            operation="quantized_linear",
            arrays=arrays,
            prepare=partial(with_weight, group_size=weight.options["group_size"]),
            covered=product.covered | weight.covered,
        )
        if self.accepts(new, [product]):
            self.replace([product, weight], [new])

    def _pair(self, first: Site) -> None:
        """Makes `rope` of a rotation and a later one by the same angles."""
        if first.operation != "rotation":
            return
        others = (site for site in self.sites if site.operation == "rotation" and site is not first)
        later = sorted((site for site in others if site.root.index > first.root.index), key=lambda s: s.root.index)
        second = next((site for site in later if _rotate_alike(first, site)), None)
        if second is None or _depends(second, first):
            return
        query, key = first, second
        if self._is_key(first) or (first.arrays["x"].shape[2] < second.arrays["x"].shape[2]):
            query, key = second, first
        arrays = {"query": query.arrays["x"], "key": key.arrays["x"]}
        arrays |= {"positions": query.arrays["positions"]} if "positions" in query.arrays else {}
        new = Site(
            operation="rope",
            arrays=arrays,
            options=query.options,
            results=(*query.results, *key.results),
            orders=(*query.orders, *key.orders),
            covered=query.covered | key.covered,
            shared=query.shared | key.shared,
            broadcasting=frozenset(("positions",)),
            prepare=with_positions,
        )
        if self.accepts(new, []):
            self.replace([first, second], [new])

    def _is_key(self, rotation: Site) -> bool:
        readers = self.readers(rotation.results[0])
        attentions = [site for site in readers if site is not None and site.operation == "attention"]
        return any(self.origin(site.arrays["key"].value) is rotation for site in attentions)

    def _add_before_norms(self, norm: Site) -> None:
        """Moves the sum before a norm to the product that is one of its sides."""
        if norm.operation not in _NORMS or "residual" not in norm.arrays:
            return
        for one, other in (("x", "residual"), ("residual", "x")):
            product = self.producer_of(norm.arrays[one])
            if product is None or product.operation != "linear" or not self._feeds_only(product.results[0], [norm]):
                continue
            if "residual" in product.arrays or "activation" in product.options:
                continue
            total = norm.results[1]
            shape = (*product.arrays["x"].shape[:-1], product.arrays["w"].shape[1])
            if total.equation is None or not is_whole(norm.arrays[other]):
                continue
            arrays = {**product.arrays, "residual": replace(norm.arrays[other], shape=shape)}
            added = replace(
                product, arrays=arrays, results=(total,), orders=((),), covered=product.covered | {total.equation}
            )
            arrays = {name: each for name, each in norm.arrays.items() if name != "residual"}
            arrays["x"] = replace(norm.arrays["x"], value=total)
            covered = norm.covered - {total.equation}
            alone = replace(norm, arrays=arrays, results=norm.results[:1], orders=norm.orders[:1], covered=covered)
            if self.implementation(added) != "xla" or self.implementation(norm) == "xla":
                self.replace([product, norm], [added, alone])
                return

    def _give_mean_squares(self, norm: Site) -> None:
        """Makes `linear_residual_norm` of a product, a sum, and a norm without a scale in front of products."""
        if norm.operation != "rms_norm" or set(norm.arrays) != {"x"}:
            return
        product = self.producer_of(norm.arrays["x"])
        if product is None or product.operation != "linear" or "residual" not in product.arrays:
            return
        readers = self.readers(norm.results[0])
        if product.options or not readers or not all(self._is_normed(s, norm) for s in readers):
            return
        total = product.results[0]
        rows = product.arrays["x"].shape[:-1]
        mean_square = Value(jax.ShapeDtypeStruct(rows, jnp.promote_types(total.dtype, jnp.float32)))
        added = replace(
            product,
            operation="linear_residual_norm",
            results=(total, mean_square),
            orders=(product.orders[0], ()),
            covered=product.covered | norm.covered,
        )
        given = Binding(mean_square, tuple((0, 1, n) for n in rows), rows, tuple(range(len(rows))), rows)
        new = [self._normed(site, norm, given) for site in readers if site is not None]
        if self.accepts(added, [product]) and all(self.accepts(s, [norm]) for s in new):
            self.replace([product, norm, *(s for s in readers if s is not None)], [added, *new])

    def _normalize(self, norm: Site) -> None:
        """Moves a norm into the product behind it."""
        if norm.operation not in _NORMS or "residual" in norm.arrays:
            return
        readers = self.readers(norm.results[0])
        if len(readers) != 1 or not all(self._is_normed(site, norm) for site in readers):
            return
        (product,) = readers
        assert product is not None
        new = self._normed(product, norm)
        if self.is_wanted(new.operation) and self.accepts(new, [norm, product]):
            self.replace([norm, product], [new])

    def _is_normed(self, product: Site | None, norm: Site) -> bool:
        if product is None or product.operation not in _PRODUCTS or "norm_x" in product.options:
            return False
        return self.producer_of(product.arrays["x"]) is norm and is_whole(norm.arrays["x"])

    def _normed(self, product: Site, norm: Site, mean_square: Binding | None = None) -> Site:
        x = replace(norm.arrays["x"], shape=product.arrays["x"].shape)
        arrays = {**product.arrays, "x": x}
        arrays |= {f"norm_{name}": norm.arrays[name] for name in ("scale", "bias") if name in norm.arrays}
        if mean_square is not None:
            arrays["norm_mean_square"] = replace(mean_square, shape=x.shape[:-1])
        kind = "rms" if norm.operation == "rms_norm" else "layer"
        default = 1e-6 if kind == "rms" else 1e-5
        return replace(
            product,
            operation="norm_linear" if product.operation == "linear" else product.operation,
            arrays=arrays,
            prepare=Normed(kind, norm.options.get("epsilon", default), product.prepare),
            covered=product.covered | norm.covered,
        )

    def _take_logits(self, loss: Site) -> None:
        if loss.operation != "cross_entropy":
            return
        product = self.producer_of(loss.arrays["logits"])
        if product is None or product.operation != "linear" or set(product.arrays) != {"x", "w"} or product.options:
            return
        if not self._feeds_only(product.results[0], [loss]):
            return
        labels, x = loss.arrays["labels"], product.arrays["x"]
        hidden = replace(x, shape=(*labels.shape, x.shape[-1]))
        w = product.arrays["w"]
        new = replace(
            loss,
            operation="linear_cross_entropy",
            arrays={"hidden": hidden, "w": w, "labels": labels},
            prepare=None if loss.prepare is None else partial(of_hidden, prepare=loss.prepare),
            covered=loss.covered | product.covered,
        )
        if self.accepts(new, [loss, product]):
            self.replace([loss, product], [new])


def _rotate_alike(one: Site, other: Site) -> bool:
    shapes = [(*(site.arrays["x"].shape[axis] for axis in (0, 1, 3)), site.results[0].dtype) for site in (one, other)]
    positions = [site.arrays.get("positions") for site in (one, other)]
    if one.options.keys() != other.options.keys():
        return False
    same = all(np.array_equal(value, other.options[name]) for name, value in one.options.items())
    return shapes[0] == shapes[1] and positions[0] == positions[1] and same


def _depends(later: Site, earlier: Site) -> bool:
    """Returns whether a site needs the result of one before it."""
    ends, first = set(earlier.results), earlier.root.index
    seen: set[Value] = set()
    pending = [binding.value for binding in later.arrays.values()]
    while pending:
        value = pending.pop()
        if value in ends:
            return True
        if value not in seen and value.equation is not None and value.equation.index > first:
            seen.add(value)
            pending += value.equation.inputs
    return False
