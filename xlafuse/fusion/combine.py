"""Combines sites to larger ones, where one operation does in one call what others do one after the other.

An operation such as `norm_linear` is defined as one operation after another, so that sites of both, the one's result
being the other's argument and nobody else's, are a site of it. Where the larger operation would leave the work to XLA
and one of its parts would not, the parts stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from xlafuse.fusion.binding import Binding, is_cut, is_permuted, is_whole, order_of, whole
from xlafuse.fusion.combination import PRODUCTS, Combination
from xlafuse.fusion.graph import Equation, Graph, Value, depends_on
from xlafuse.fusion.layouts import element, peel
from xlafuse.fusion.odd_sizes import NAME as PADDED
from xlafuse.fusion.prepare import Normed, with_weight
from xlafuse.fusion.projection import project
from xlafuse.fusion.schedule import is_acyclic
from xlafuse.fusion.site import NORMS, Refusal, Site
from xlafuse.fusion.spellings import OPERATIONS, Choices
from xlafuse.fusion.streams import with_streams
from xlafuse.fusion.worth import COPIES, with_gradients_only, worthwhile

_CUT = "it rotates some of an array's tokens or columns; a kernel would need copies of them"


def combined(
    graph: Graph, sites: Sequence[Site], choices: Choices
) -> tuple[tuple[Site, ...], tuple[Site, ...], list[Refusal]]:
    """Combines sites and drops parts and unwanted operations.

    Returns the sites, those that stay as they are written, and what was refused.
    """
    combination = Combination(graph, sites, choices)
    copying = combination.drop_copying()
    _apply_rules(combination)
    together = combination.sites
    if not is_acyclic(graph, together):
        together = list(sites)
    refused = [
        Refusal(operation="rope", value=site.results[0], reason=_CUT)
        for site in together
        if site.operation == "rotation"
    ]
    refused += [
        Refusal(operation=site.operation, value=site.results[0], reason=COPIES, covered=site.covered)
        for site in copying
    ]
    wanted = [site for site in together if site.operation not in OPERATIONS and site.operation in choices]
    options = {"keeps_all": choices.ops is not None, "pads": PADDED in choices}
    called, written, more = worthwhile(graph, wanted, combination.implementation, **options)
    called = with_streams(graph, called, combination.implementation)
    if combination.judges:
        called = with_gradients_only(graph, called)
    return called, tuple(written), [*refused, *more]


def _apply_rules(combination: Combination) -> None:
    """Applies the rules, one after the other; each looks at one site of some operations."""
    for wanted, operations, rule in (
        ("cross_entropy", ("cross_entropy",), _sum_losses),
        ("quantized_linear", ("linear",), _quantize),
        ("rope", ("rotation",), _pass_through),
        ("rope", ("rotation",), _pair),
        ("linear", NORMS, _add_before_norms),
        ("qkv_projection", ("linear",), project),
        ("linear_residual_norm", ("rms_norm",), _give_mean_squares),
        ("rope", ("rotation",), _rotate),
        ("linear_cross_entropy", ("cross_entropy",), _take_logits),
        (None, NORMS, _normalize),
    ):
        if wanted is None or wanted in combination.choices:
            for site in combination.sites:
                if site in combination and site.operation in operations:
                    rule(combination, site)


def _sum_losses(combination: Combination, loss: Site) -> None:
    if "reduction" in loss.options or len(loss.results[0].shape) == 0:
        return
    value = loss.results[0]
    skipped: list[Equation] = []
    while (
        value not in combination.returned
        and len(value.users) == 1
        and value.users[0].primitive in ("reshape", "squeeze")
    ):
        skipped.append(value.users[0])
        value = value.users[0].outputs[0]
    if value in combination.returned or len(value.users) != 1:
        return
    (user,) = value.users
    if user.primitive != "reduce_sum" or len(user.params["axes"]) != len(value.shape) or user in combination.owners:
        return
    total = replace(
        loss,
        results=(user.outputs[0],),
        orders=((),),
        options={**loss.options, "reduction": "sum"},
        covered=loss.covered | {user, *skipped},
    )
    if combination.accepts(total, [loss]):
        combination.replace([loss], [total])


def _quantize(combination: Combination, product: Site) -> None:
    w = product.arrays["w"]
    weight = combination.origin(w.value)
    if weight is None or weight.operation != "dequantized" or w.value is not weight.results[0]:
        return
    if order_of(w) != weight.orders[0] or not combination.feeds_only(w.value, [product]):
        return
    arrays = {name: each for name, each in product.arrays.items() if name != "w"} | dict(weight.arrays)
    new = replace(
        product,
        operation="quantized_linear",
        arrays=arrays,
        prepare=partial(with_weight, group_size=weight.options["group_size"]),
        covered=product.covered | weight.covered,
    )
    if combination.accepts(new, [product]):
        combination.replace([product, weight], [new])


def _pass_through(combination: Combination, rotation: Site) -> None:
    """Takes in the last columns of heads, which are joined to the rotated ones as they are."""
    result = rotation.results[0]
    if result in combination.returned or len(result.users) != 1:
        return
    (join,), x, rotated = result.users, rotation.arrays["x"], result.shape[-1]
    if join.primitive != "concatenate" or join.params["dimension"] != len(result.shape) - 1 or len(join.inputs) != 2:
        return
    rest, size = join.inputs[1], join.outputs[0].shape[-1]
    heads = replace(x, places=(*x.places[:-1], (0, 1, size)), parts=(*x.parts[:-1], size), shape=(*x.shape[:-1], size))
    if join.inputs[0] is not result or x.places[-1] != (0, 1, rotated) or not is_whole(heads):
        return
    own = element(rest)
    found = peel(own)
    *others, last = own.indices
    if found.value is not x.value or found.indices != (*others, replace(last, start=rotated)):
        return
    new = replace(
        rotation,
        arrays={**rotation.arrays, "x": heads},
        results=join.outputs,
        options={**rotation.options, "rotated": rotated},
        covered=rotation.covered | {join},
    )
    combination.replace([rotation], [new])


def _pair(combination: Combination, first: Site) -> None:
    """Makes `rope` of a rotation and a later one by the same angles."""
    if is_cut(first.arrays["x"]):
        return
    others = (site for site in combination.sites if site.operation == "rotation" and site is not first)
    later = sorted((site for site in others if site.root.index > first.root.index), key=lambda s: s.root.index)
    second = next((site for site in later if _rotate_alike(first, site)), None)
    if second is None or any(depends_on(each.value, first.results) for each in second.arrays.values()):
        return
    query, key = sorted((first, second), key=lambda each: -each.arrays["x"].shape[2])  # a key may have fewer heads
    new = replace(
        _rotation(query),
        arrays={**_rotation(query).arrays, "key": key.arrays["x"]},
        results=(*query.results, *key.results),
        orders=(*query.orders, *key.orders),
        covered=query.covered | key.covered,
        shared=query.shared | key.shared,
    )
    if combination.accepts(new, []):
        combination.replace([first, second], [new])


def _rotate(combination: Combination, rotation: Site) -> None:
    """Makes `rope` of a rotation that has no other like it."""
    if not is_cut(rotation.arrays["x"]) and combination.accepts(new := _rotation(rotation), []):
        combination.replace([rotation], [new])


def _rotation(site: Site) -> Site:
    arrays = {"query" if name == "x" else name: binding for name, binding in site.arrays.items()}
    return replace(site, operation="rope", arrays=arrays)


def _add_before_norms(combination: Combination, norm: Site) -> None:
    """Moves the sum before a norm to the product that is one of its sides."""
    if "residual" not in norm.arrays:
        return
    for one, other in (("x", "residual"), ("residual", "x")):
        product = combination.producer_of(norm.arrays[one])
        if product is None or product.operation != "linear" or not combination.feeds_only(product.results[0], [norm]):
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
        if combination.implementation(added) != "xla" or combination.implementation(norm) == "xla":
            combination.replace([product, norm], [added, alone])
            return


def _give_mean_squares(combination: Combination, norm: Site) -> None:
    """Makes `linear_residual_norm` of a product, a sum, and a norm without a scale in front of products."""
    if set(norm.arrays) != {"x"}:
        return
    product = combination.producer_of(norm.arrays["x"])
    if product is None or product.operation != "linear" or "residual" not in product.arrays:
        return
    readers = combination.readers(norm.results[0])
    if product.options or not readers or not all(_is_normed(combination, s, norm) for s in readers):
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
    given = whole(mean_square)
    new = [_normed(site, norm, given) for site in readers if site is not None]
    if combination.accepts(added, [product]) and all(combination.accepts(s, [norm]) for s in new):
        combination.replace([product, norm, *(s for s in readers if s is not None)], [added, *new])


def _normalize(combination: Combination, norm: Site) -> None:
    """Moves a norm into the product behind it."""
    if "residual" in norm.arrays:
        return
    readers = combination.readers(norm.results[0])
    if len(readers) != 1 or not all(_is_normed(combination, site, norm) for site in readers):
        return
    (product,) = readers
    assert product is not None
    new = _normed(product, norm)
    if new.operation in combination.choices and combination.accepts(new, [norm, product]):
        combination.replace([norm, product], [new])


def _is_normed(combination: Combination, product: Site | None, norm: Site) -> bool:
    if product is None or product.operation not in PRODUCTS or "norm_x" in product.options:
        return False
    return combination.producer_of(product.arrays["x"]) is norm and is_whole(norm.arrays["x"])


def _normed(product: Site, norm: Site, mean_square: Binding | None = None) -> Site:
    x = replace(norm.arrays["x"], shape=product.arrays["x"].shape)
    arrays = {**product.arrays, "x": x}
    arrays |= {f"norm_{name}": norm.arrays[name] for name in ("scale", "bias") if name in norm.arrays}
    if mean_square is not None:
        arrays["norm_mean_square"] = replace(mean_square, shape=x.shape[:-1])
    kind = "rms" if norm.operation == "rms_norm" else "layer"
    return replace(
        product,
        operation="norm_linear" if product.operation == "linear" else product.operation,
        arrays=arrays,
        prepare=Normed(options={"kind": kind, **norm.options}, prepare=product.prepare),
        covered=product.covered | norm.covered,
    )


def _take_logits(combination: Combination, loss: Site) -> None:
    logits, labels = loss.arrays["logits"], loss.arrays["labels"]
    of_all = combination.producer_of(logits)
    product = of_all or combination.origin(logits.value)
    if product is None or product.operation != "linear" or set(product.arrays) != {"x", "w"} or product.options:
        return
    hidden, w = product.arrays["x"] if of_all else _some_rows(product, logits), product.arrays["w"]
    if hidden is None or not combination.feeds_only(product.results[0], [loss]):
        return
    hidden = replace(hidden, shape=(*labels.shape, hidden.shape[-1]))
    new = replace(
        loss,
        operation="linear_cross_entropy",
        arrays={"hidden": hidden, "w": w, "labels": labels},
        covered=loss.covered | product.covered,
    )
    if combination.accepts(new, [loss, product]):
        combination.replace([loss, product], [new])


def _some_rows(product: Site, result: Binding) -> Binding | None:
    """Returns the rows of a product's x that an argument is the result of; None where it is no range of rows."""
    x, value = product.arrays["x"], product.results[0]
    while result.value is not value:
        equation = result.value.equation
        if equation is None or equation.primitive not in ("slice", "reshape", "squeeze"):
            return None
        inner = equation.inputs[0]
        if equation.primitive == "slice":
            params, places = equation.params, result.places
            ranges = zip(places, params["start_indices"], params["strides"] or (1,) * len(places), strict=True)
            places = tuple((first + start * by, step * by, size) for (start, step, size), first, by in ranges)
            result = replace(result, value=inner, places=places)
        elif is_whole(result):
            result = replace(result, value=inner, places=tuple((0, 1, n) for n in inner.shape), parts=inner.shape)
        else:
            return None
    if is_permuted(product.orders[0]) or is_permuted(result.order) or result.missing:
        return None
    columns, features = product.arrays["w"].shape[1], x.value.shape[-1]
    has_columns = result.places[-1] == (0, 1, columns) and result.parts[-1] == columns
    if not has_columns or not is_whole(x) or x.value.shape[:-1] != value.shape[:-1]:
        return None
    parts = (*result.parts[:-1], features)
    return Binding(x.value, (*result.places[:-1], (0, 1, features)), parts, tuple(range(len(parts))), parts)


def _rotate_alike(one: Site, other: Site) -> bool:
    shapes = [(*(site.arrays["x"].shape[axis] for axis in (0, 1, 3)), site.results[0].dtype) for site in (one, other)]
    tables = [{name: each for name, each in site.arrays.items() if name != "x"} for site in (one, other)]
    return shapes[0] == shapes[1] and tables[0] == tables[1] and one.options == other.options
