"""Makes one site of the products of query, key and value, their biases, norms and rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xlafuse.fusion.binding import Binding, is_permuted
from xlafuse.fusion.combination import Combination
from xlafuse.fusion.graph import Value
from xlafuse.fusion.prepare import Projection
from xlafuse.fusion.site import Site


def project(combination: Combination, product: Site) -> None:
    """Makes one operation of the products of query, key and value, one of which is given, and what follows them."""
    if set(product.arrays) - {"x", "w", "bias"} or product.options:
        return
    x = product.arrays["x"]
    same = [s for s in combination.sites if s.operation == "linear" and s.arrays["x"] == x]
    if len(same) != 3 or any(set(s.arrays) != set(product.arrays) or s.options for s in same):
        return
    if any(is_permuted(s.orders[0]) for s in same):
        return
    heads = {id(s): _heads(combination, s) for s in same}
    rope = next((r for r in heads.values() if r and r[-1].operation == "rope"), (None,))[-1]
    roles = _roles(combination, same, heads, rope)
    if roles is None:
        return
    new, old = _projection(combination, roles, [heads[id(s)] for s in roles], rope)
    if new is not None and combination.accepts(new, old):
        combination.replace(old, [new])


def _heads(combination: Combination, product: Site) -> tuple[Site, ...]:
    """Returns the norm, the rotation, or both that follow a product by heads."""
    found: list[Site] = []
    site = product
    while len(readers := combination.readers(site.results[0])) == 1:
        (reader,) = readers
        if reader is None:
            break
        if reader.operation == "rms_norm" and not found and set(reader.arrays) <= {"x", "scale"}:
            is_next = combination.producer_of(reader.arrays["x"]) is site
        elif reader.operation == "rope" and "key" in reader.arrays and "rotated" not in reader.options:
            is_next = any(combination.producer_of(reader.arrays[name]) is site for name in ("query", "key"))
        else:
            break
        if not is_next:
            break
        found.append(reader)
        if reader.operation == "rope":
            break
        site = reader
    return tuple(found)


def _roles(
    combination: Combination, same: Sequence[Site], heads: Mapping[int, Any], rope: Site | None
) -> list[Site] | None:
    """Returns the query, key and value products in this order, or None if it cannot tell which is which."""
    if rope is not None:
        last = {name: combination.producer_of(rope.arrays[name]) for name in ("query", "key")}
        chain = {id(s): [s, *heads[id(s)][:-1]][-1] for s in same if heads[id(s)] and heads[id(s)][-1] is rope}
        named = {name: next((s for s in same if chain.get(id(s)) is last[name]), None) for name in last}
        query, key = named["query"], named["key"]
        rest = [s for s in same if s is not query and s is not key]
        if query is None or key is None or query is key or len(rest) != 1 or heads[id(rest[0])]:
            return None
        return [query, key, rest[0]]
    ends = {id(s): [s, *heads[id(s)]][-1] for s in same}
    for attention in (s for s in combination.sites if s.operation == "attention"):
        origins = [combination.origin(attention.arrays[name].value) for name in ("query", "key", "value")]
        roles = [next((s for s in same if ends[id(s)] is origin), None) for origin in origins]
        if None not in roles and len({id(s) for s in roles}) == 3 and not heads[id(roles[2])]:
            return [s for s in roles if s is not None]
    return None


def _projection(
    combination: Combination, roles: Sequence[Site], heads: Sequence[tuple[Site, ...]], rope: Site | None
) -> tuple[Site | None, list[Site]]:
    norms = [next((s for s in own if s.operation == "rms_norm"), None) for own in heads[:2]]
    x = roles[0].arrays["x"]
    results, orders, head_sizes = [], [], set()
    for product, own in zip(roles, heads, strict=True):
        result, order = product.results[0], product.orders[0]
        for site in own:
            is_key = site.operation == "rope" and combination.producer_of(site.arrays["key"]) in (product, *own)
            result, order = site.results[is_key], site.orders[is_key]
            head_sizes.add(site.arrays["key" if is_key else "query" if site.operation == "rope" else "x"].shape[-1])
        results.append(result)
        orders.append(order)
    if len(head_sizes) > 1:
        return None, []
    if rope is not None:
        batch, tokens = rope.arrays["query"].shape[:2]
        x = replace(x, shape=(batch, tokens, x.shape[-1]))
    arrays: dict[str, Binding] = {"x": x} | {f"w_{name}": s.arrays["w"] for name, s in zip("qkv", roles, strict=True)}
    if "bias" in roles[0].arrays:
        arrays |= {f"b_{name}": s.arrays["bias"] for name, s in zip("qkv", roles, strict=True)}
    options: dict[str, Any] = {"head_size": head_sizes.pop()} if head_sizes else {}
    for name, norm in zip("qk", norms, strict=True):
        if norm is not None and "scale" in norm.arrays:
            arrays[f"{name}_scale"] = norm.arrays["scale"]
    if rope is not None:
        arrays |= {name: each for name, each in rope.arrays.items() if name not in ("query", "key")}
    old = list(dict.fromkeys([*roles, *(s for own in heads for s in own)]))
    new = Site(
        operation="qkv_projection",
        arrays=arrays,
        options=options,
        results=tuple(results),
        orders=tuple(_with_heads(order, value) for order, value in zip(orders, results, strict=True)),
        covered=frozenset().union(*(s.covered for s in old)),
        shared=frozenset().union(*(s.shared for s in old)),
        broadcasting=frozenset() if rope is None else rope.broadcasting,
        prepare=Projection(
            norms={name: None if norm is None else norm.options for name, norm in zip("qk", norms, strict=True)},
            rope=None if rope is None else rope.options,
            tables=None if rope is None else rope.prepare,
        ),
    )
    return new, old


def _with_heads(order: tuple[int, ...], value: Value) -> tuple[int, ...]:
    """Returns how the axes of a rotation's result are transposed; those of a product are not."""
    return order if len(order) == len(value.shape) == 4 and is_permuted(order) else ()
