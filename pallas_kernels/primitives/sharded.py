"""Calls of operations whose work devices share: each computes its parts of the results from its parts of the arrays.

XLA asks, while it partitions a program, how a call's arrays are to be cut. The call's `Rule` answers, and the operation
is traced on one device's arrays, with the kernels that serve those.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as jax_config
from jax._src.custom_partitioning import _CUSTOM_PARTITIONING_CALL_NAME, _sharding_callbacks, _ShardingCallbackInfo
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.interpreters.batching import fancy_primitive_batchers
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import ShardingContext, parse_flatten_op_sharding
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from pallas_kernels.primitives.dimensions import (
    ROWS,
    Axes,
    Dimensions,
    Rule,
    axes_at,
    names_in,
    rule_of,
    sizes_apart,
    spec_of,
)
from pallas_kernels.primitives.platform import target_device

notify: ContextVar[Callable[[str, str], None] | None] = ContextVar("notify", default=None)
"""Takes what a call does in a program that is lowered, and why, for a warning."""
_NONE = AbstractMesh((), ())


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over the devices that share a name, for `Dimensions.parts`.

    axes: over which the name is cut. scattered: the dimension of the results along which each device keeps its part of
    the sum alone, or None where it keeps the sum.
    """

    axes: Axes
    scattered: int | None = None

    def total(self, part: jax.Array) -> jax.Array:
        """Returns the sum of all devices' arrays, or this device's part of it."""
        if self.scattered is None:
            return lax.psum(part, self.axes)
        return lax.psum_scatter(part, self.axes, scatter_dimension=self.scattered, tiled=True)

    def mean(self, part: jax.Array) -> jax.Array:
        """Returns the mean over the last dimension, which is cut, and which the result has with size 1."""
        return lax.pmean(jnp.mean(part, axis=-1, keepdims=True), self.axes)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one call's arrays are cut.

    axes_of: the mesh axes of each name that is cut. sizes: of each name's part. sums: for `Dimensions.parts`.
    along: the names along which these scatter, and over how many devices. scattered: for results that are sums over
    devices, the dimensions that are scattered and the axes.
    """

    axes_of: Mapping[str, Axes]
    sizes: Mapping[str, int]
    along: Mapping[str, int]
    sums: Mapping[str, Sums]
    scattered: tuple[Mapping[int, Axes], ...]

    @property
    def shared(self) -> Axes:
        """The axes over which the work is cut, without sums for it."""
        summed = {axis for each in self.sums.values() for axis in each.axes}
        return tuple(axis for axes in self.axes_of.values() for axis in axes if axis not in summed)

    def sizes_of(self, summed: frozenset[str]) -> Mapping[str, int]:
        """The sizes of parts of an array that has these names of sums: they are not scattered."""
        if summed:
            return self.sizes
        return {name: size // self.along.get(name, 1) for name, size in self.sizes.items()}

    def own(self, dimensions: Sequence[tuple[str, ...]]) -> Axes:
        """The axes over which an array is cut."""
        names = names_in(dimensions)
        return tuple(axis for name, axes in self.axes_of.items() if name in names for axis in axes)

    def lacked(self, dimensions: Sequence[tuple[str, ...]]) -> Axes:
        """The axes over which the work is cut, but not this array."""
        own = self.own(dimensions)
        return tuple(axis for axis in self.shared if axis not in own)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """A function of arrays whose work devices share.

    function: of arrays. reference: the same by XLA, for programs whose mesh is not known. parts: the same with `Sums`
    first, by the names of `rule.summed` that are cut. options: the arguments that are no arrays. avals: of the arrays.
    """

    operation: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    parts: Callable[..., Any]
    rule: Rule
    options: str
    avals: tuple[Any, ...]

    @functools.cached_property
    def label(self) -> str:
        """Tells calls apart that compute different things: JAX's compile cache may be set to see no more of a call."""
        program = re.sub(r" at 0x\w+", "", str(jax.make_jaxpr(self.reference)(*self.avals)))
        return f"{self.operation} {hashlib.sha256(f'{_version()} {self.options} {program}'.encode()).hexdigest()}"

    def __call__(self, *arrays: Any) -> Any:
        """Returns the function's result."""
        types, structure = jax.tree.flatten(jax.eval_shape(self.reference, *arrays))
        return structure.unflatten(self._bind(self._result, self.rule, types, arrays))

    def differentiated(self, wanted: Sequence[bool], kept: Sequence[Any], *arrays: Any) -> tuple[Any, list[Any]]:
        """Returns the function's result as it is computed where it is differentiated, and what its gradient needs.

        kept: the types of the arrays that the gradient needs.
        """
        types, structure = jax.tree.flatten(jax.eval_shape(self.reference, *arrays))
        names = [self.rule.named(each.shape) for each in kept]
        shapes = [sizes_apart(own, each.shape, self.rule.sizes) for own, each in zip(names, kept, strict=True)]
        kept_types = [ShapedArray(shape, each.dtype) for shape, each in zip(shapes, kept, strict=True)]
        run = partial(self._result_and_kept, tuple(wanted), self._kept_by(names, kept))
        results = self._bind(run, self.rule.with_kept(names), (*types, *kept_types), arrays)
        values = [value.reshape(each.shape) for value, each in zip(results[len(types) :], kept, strict=True)]
        return structure.unflatten(results[: len(types)]), values

    def gradients(
        self, wanted: Sequence[bool], kept: Sequence[Any], arrays: Sequence[Any], cotangents: Any
    ) -> list[Any]:
        """Returns the gradients of the wanted arrays.

        kept: what `differentiated` returned. cotangents: a tree like the result, with `ad.Zero`s for none.
        """
        leaves, structure = jax.tree.flatten(cotangents, is_leaf=lambda leaf: isinstance(leaf, ad.Zero))
        given = tuple(not isinstance(leaf, ad.Zero) for leaf in leaves)
        names = [self.rule.named(each.shape) for each in kept]
        shapes = [sizes_apart(own, each.shape, self.rule.sizes) for own, each in zip(names, kept, strict=True)]
        operands = [*arrays, *(value.reshape(shape) for value, shape in zip(kept, shapes, strict=True))]
        operands += [leaf for leaf in leaves if not isinstance(leaf, ad.Zero)]
        run = partial(self._gradients, tuple(wanted), self._kept_by(names, kept), given, structure)
        types = [jax.typeof(array) for array, each in zip(arrays, wanted, strict=True) if each]
        return self._bind(run, self.rule.for_gradients(wanted, names, given), types, operands)

    def _bind(self, run: Callable[..., Any], rule: Rule, types: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        avals = tuple((each.shape, each.dtype) for each in types)
        return shared_p.bind(*arrays, run=run, rule=rule, types=avals, shared=self)

    def _kept_by(self, names: Sequence[Any], kept: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        return tuple((own, each.shape, each.dtype) for own, each in zip(names, kept, strict=True))

    def _of(self, cut: Cut | None) -> Callable[..., Any]:
        if cut is None:
            return self.reference
        return partial(self.parts, cut.sums) if cut.sums else self.function

    def _result(self, cut: Cut | None, *arrays: Any) -> list[Any]:
        return jax.tree.leaves(self._of(cut)(*arrays))

    def _result_and_kept(self, wanted: Sequence[bool], kept: Any, cut: Cut | None, *arrays: Any) -> list[Any]:
        result, pullback = with_pullback(self._of(cut), wanted, *arrays)
        values, parts = computed_among(pullback, arrays), self._parts(kept, cut)
        if _types_of(values) != [(whole, dtype) for whole, _, dtype in parts]:
            # The gradient computes them again, as it finds the same there. NaN, lest it take these.
            values = [_invalid(whole, dtype) for whole, _, dtype in parts]
        values = [value.reshape(shape) for value, (_, shape, _) in zip(values, parts, strict=True)]
        return [*jax.tree.leaves(result), *values]

    def _gradients(
        self,
        wanted: Sequence[bool],
        kept: Any,
        given: Sequence[bool],
        structure: Any,
        cut: Cut | None,
        *operands: Any,
    ) -> list[Any]:
        count = len(wanted) + len(kept)
        arrays: Sequence[Any] = operands[: len(wanted)]
        values, cotangents = operands[len(wanted) : count], iter(operands[count:])
        if cut is not None and cut.sums:
            arrays = [_varying(array, cut.shared) for array in arrays]
        result, pullback = with_pullback(self._of(cut), wanted, *arrays)
        again, parts = computed_among(pullback, arrays), self._parts(kept, cut)
        if cut is not None and _types_of(again) == [(whole, dtype) for whole, _, dtype in parts]:
            own = {
                id(old): _varying(new.reshape(old.shape), tuple(jax.typeof(old).manual_axis_type.varying))
                for old, new in zip(again, values, strict=True)
            }
            pullback = jax.tree.map(lambda leaf: own.get(id(leaf), leaf), pullback)
        leaves = jax.tree.leaves(result)
        pulled = [next(cotangents) if each else ad.Zero(jax.typeof(y)) for y, each in zip(leaves, given, strict=True)]
        if cut is not None:
            pulled = [
                each if isinstance(each, ad.Zero) else _share(each, cut.lacked(own), y)
                for each, own, y in zip(pulled, self.rule.results, leaves, strict=True)
            ]
        return list(pullback(structure.unflatten(pulled)))

    def _parts(self, kept: Any, cut: Cut | None) -> list[tuple[tuple[int, ...], tuple[int, ...], Any]]:
        """Returns shape, shape with a dimension for each name, and dtype of one device's parts of kept arrays."""
        parts = []
        for names, shape, dtype in kept:
            sizes = self.rule.sizes if cut is None else cut.sizes_of(names_in(names) & self.rule.summed)
            whole = tuple(
                prod(sizes[name] for name in own) if own else size for own, size in zip(names, shape, strict=True)
            )
            parts.append((whole, sizes_apart(names, shape, sizes), dtype))
        return parts


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # where the packages are not installed
        return importlib.metadata.version("xlafuse")
    return ""


def computed_among(tree: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the arrays of a tree that are not among the operands."""
    places = set(map(id, operands))
    return [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in places]


def _types_of(values: Sequence[Any]) -> list[tuple[tuple[int, ...], Any]]:
    return [(value.shape, value.dtype) for value in values]


def _invalid(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


def _share(cotangent: jax.Array, axes: Axes, result: jax.Array) -> jax.Array:
    """Returns one device's share of the cotangent of a result that is the same on the devices along `axes`."""
    if axes:
        cotangent = (cotangent / lax.axis_size(axes)).astype(cotangent.dtype)
    return _varying(cotangent, tuple(jax.typeof(result).manual_axis_type.varying))


def shared_by(
    operation: str,
    dimensions: Dimensions,
    function: Callable[..., Any],
    call: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Any,
    places: Sequence[int],
) -> Shared | None:
    """Returns a call of an operation as one whose work devices share, or None if they cannot.

    function: the operation. call, reference: the call as a function of its arrays, with its kernels and by XLA.
    arguments: its positional arguments and those by name. places: where the arrays are among their leaves.
    """
    leaves, structure = jax.tree.flatten(arguments)
    signature = inspect.signature(function)

    def by_name(leaves: Sequence[Any]) -> dict[str, Any]:
        args, kwargs = jax.tree.unflatten(structure, leaves)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    paths = jax.tree_util.tree_leaves_with_path(by_name([_Place(i) for i in range(len(leaves))]))
    name_of = {
        leaf.i: jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in paths
        if isinstance(leaf, _Place)
    }
    shapes = [(name_of[place], leaves[place].shape) for place in places]
    results = jax.tree.leaves(jax.eval_shape(reference, *(leaves[place] for place in places)))
    rule = rule_of(dimensions, by_name(leaves), shapes, [each.shape for each in results])
    if isinstance(rule, str):
        return None

    def parts(sums: Mapping[str, Sums], *arrays: Any) -> Any:
        assert dimensions.parts is not None
        merged = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            merged[place] = array
        return dimensions.parts(by_name(merged), sums)

    others = {place: leaf for place, leaf in enumerate(leaves) if place not in places}
    return Shared(
        operation=operation,
        function=call,
        reference=reference,
        parts=parts,
        rule=rule,
        options=re.sub(r" at 0x\w+", "", f"{others} {structure}"),
        avals=tuple(jax.ShapeDtypeStruct(leaves[place].shape, leaves[place].dtype) for place in places),
    )


@dataclass(frozen=True)
class _Place:
    """Stands for a leaf of the arguments."""

    i: int


def with_pullback(function: Callable[..., Any], wanted: Sequence[bool], *values: Any) -> Any:
    """Returns the function's result and its pullback to the wanted arguments."""

    def of_wanted(*own: Any) -> Any:
        given = iter(own)
        return function(*(next(given) if is_wanted else value for value, is_wanted in zip(values, wanted, strict=True)))

    return jax.vjp(of_wanted, *(value for value, is_wanted in zip(values, wanted, strict=True) if is_wanted))


def needed(function: Callable[..., Any], *arrays: Any) -> list[Any]:
    """Calls a function without what does not lead to its results: Shardy would give axes to it."""
    closed = jax.make_jaxpr(function)(*arrays)
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*arrays)


def _varying(array: jax.Array, axes: Axes) -> jax.Array:
    """Marks an array as varying over mesh axes."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(array).manual_axis_type.varying)
    return lax.pcast(array, missing, to="varying") if missing else array


def mesh_of(ctx: Any) -> AbstractMesh | None:
    """Returns the mesh of a program that is lowered and will be compiled in this process, or None."""
    context = ctx.module_context
    if not isinstance(context.axis_context, ShardingContext) or context.lowering_parameters.for_export:
        return None
    if context.backend is None or _platform(context.backend.platform) not in map(_platform, context.platforms):
        return None
    meshes = {each.mesh_shape for each in context.sharding_attr_cache if each.mesh_shape}
    if len(meshes) != 1 or any(each.logical_device_ids for each in context.sharding_attr_cache):
        return None
    # XLA may cut a dimension over a part of an axis, such as 2 key heads over half of 4 devices. Parts are axes here.
    names, sizes = zip(*(each for axis in meshes.pop() for each in _prime_axes(*axis)), strict=True)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def _platform(name: str) -> str:
    return "cuda" if name == "gpu" else name


def _prime_axes(name: str, size: int) -> Iterator[tuple[str, int]]:
    """Yields the parts of a mesh axis, of prime sizes, the major one first."""
    factors = [factor for factor in range(2, size + 1) if size % factor == 0]
    if factors in ([], [size]):
        yield name, size
        return
    yield f"{name}.{size}", factors[0]
    yield from _prime_axes(name, size // factors[0])


def _lower(ctx: Any, *values: Any, run: Callable[..., Any], rule: Rule, types: Any, shared: Shared) -> Any:
    """Emits the call as `jax.experimental.custom_partitioning` does, which would need the devices to be present."""
    del types
    context, mesh = ctx.module_context, mesh_of(ctx)
    if mesh is None:
        return mlir.lower_fun(partial(run, None))(ctx, *values)
    mesh = mesh.update(abstract_device=_device(context.platforms))
    operands, results = (jax.tree.structure(tuple(avals)) for avals in (ctx.avals_in, ctx.avals_out))

    def spec(sharding: Any, rank: int) -> NamedSharding:
        found = parse_flatten_op_sharding(sharding, mesh)[0] if sharding is not None else ()
        return NamedSharding(mesh, PartitionSpec(*found, *(None,) * (rank - len(found))))

    callback = _ShardingCallbackInfo(
        None, partial(_partition, run, rule, notify.get()), spec, operands, results, None, context, mesh, ()
    )
    key = str(id(callback))
    _sharding_callbacks[key.encode()] = callback
    context.add_keepalive(callback)
    call = hlo.CustomCallOp(
        [mlir.aval_to_ir_type(context, aval) for aval in ctx.avals_out],
        list(values),
        call_target_name=ir.StringAttr.get(_CUSTOM_PARTITIONING_CALL_NAME),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(key),
        operand_layouts=None,
        result_layouts=None,
    )
    ins, outs = ([value.type for value in each] for each in (values, call.results))
    label = {"shared_call": ir.StringAttr.get(shared.label)}
    call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(label)
    call.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(rule.shardy(), ins, outs)
    return call.results


def _device(platforms: Sequence[str]) -> AbstractDevice:
    """Returns the device that the program is lowered for; while XLA partitions it, no mesh names one."""
    device = target_device()
    if device.platform not in platforms:
        return AbstractDevice(device_kind=platforms[0], num_cores=None, platform=platforms[0])
    platform = "gpu" if device.platform == "cuda" else device.platform
    return AbstractDevice(device_kind=device.kind, num_cores=device.core_count, platform=platform)


def _partition(
    run: Callable[..., Any],
    rule: Rule,
    warn: Callable[[str, str], None] | None,
    mesh: AbstractMesh,
    operands: Any,
    results: Any,
) -> tuple[AbstractMesh, Callable[..., Any], Any, Any]:
    """Answers how a call's arrays are cut, and returns what one device computes."""
    asked = [each.sharding.spec for each in (*operands, *results)]
    cut, specs = cut_of(rule, dict(mesh.shape), asked)
    for axis, labels in rule.gathered(asked, cut.axes_of).items() if warn else ():
        what = f"gathers {', '.join(dict.fromkeys(labels))} over the mesh axis {axis!r}"
        warn(what, "the operation cannot be cut there, so that devices along this axis repeat its work")
    manual = mesh.update(axis_types=(AxisType.Manual,) * len(mesh.axis_names))

    def local(*arrays: Any) -> Any:
        # JAX lets a mesh of another size replace none but the empty one.
        with use_abstract_mesh(_NONE), use_abstract_mesh(manual), jax_config._check_vma(bool(cut.sums)):
            if cut.sums:
                arrays = tuple(_varying(each, cut.own(own)) for each, own in zip(arrays, rule.operands, strict=True))
            computed = needed(partial(run, cut), *arrays)
            if rule.primal is None:
                return tuple(computed)
            pairs = zip(computed, rule.results, cut.scattered, strict=True)
            return tuple(_summed(each, cut.lacked(own), scattered) for each, own, scattered in pairs)

    places = [NamedSharding(mesh, spec) for spec in specs]
    return mesh, local, tuple(places[len(operands) :]), tuple(places[: len(operands)])


def cut_of(rule: Rule, sizes: Mapping[str, int], asked: Sequence[Any]) -> tuple[Cut, list[PartitionSpec]]:
    """Returns how a call's arrays are cut, and their partition specs.

    sizes: of the mesh axes. asked: the partition spec that XLA has for each array, operands before results.
    """
    axes_of = rule.assigned(sizes, asked)
    count = len(rule.operands)
    results = list(zip(rule.results, asked[count:], strict=True))
    sums: dict[str, Sums] = {}
    along: dict[str, Axes] = {}
    for name in sorted(rule.summed & axes_of.keys()):
        axes, place = axes_of[name], None
        if rule.primal is None and rule.scatters:
            found = [_scattered(rule, own, spec, axes, axes_of, sizes) for own, spec in results]
            if len(found[0]) == 1 and all(each == found[0] for each in found) and set(*found[0].values()) == set(axes):
                (place,) = found[0]
                along[rule.results[0][place][0]] = axes
        key = ROWS if name.startswith(ROWS) else name
        others = sums[key].axes if key in sums else ()
        sums[key] = Sums(axes=(*others, *axes), scattered=place)
    parts = {name: size // prod(sizes[axis] for axis in axes_of.get(name, ())) for name, size in rule.sizes.items()}
    counts = {name: prod(sizes[axis] for axis in axes) for name, axes in along.items()}
    cut = Cut(axes_of=axes_of, sizes=parts, along=counts, sums=sums, scattered=())
    with_scattered = {**axes_of, **along}
    specs = [spec_of(own, axes_of if names_in(own) & rule.summed else with_scattered) for own in rule.arrays]
    if rule.primal is None:
        return replace(cut, scattered=({},) * len(results)), specs
    scattered = [_scattered(rule, own, spec, cut.lacked(own), axes_of, sizes) for own, spec in results]
    for i, each in enumerate(scattered):
        entries = list(specs[count + i])
        for place, axes in each.items():
            entries[place] = axes
        specs[count + i] = PartitionSpec(*entries)
    return replace(cut, scattered=tuple(scattered)), specs


def _scattered(
    rule: Rule,
    dimensions: Sequence[tuple[str, ...]],
    asked: Any,
    summed: Axes,
    axes_of: Mapping[str, Axes],
    sizes: Mapping[str, int],
) -> dict[int, Axes]:
    """Returns the dimensions of a result along which a sum over devices is to be cut over them, with the axes."""
    found = {}
    for place, own in enumerate(dimensions):
        axes = axes_at(asked, place)
        is_free = len(own) == 1 and own[0] not in axes_of and own[0] not in rule.whole
        if axes and set(axes) <= set(summed) and is_free and rule.sizes[own[0]] % prod(sizes[a] for a in axes) == 0:
            found[place] = axes
    return found


def _summed(part: jax.Array, axes: Axes, scattered: Mapping[int, Axes]) -> jax.Array:
    """Returns the sum of all devices' parts over mesh axes, of which each device keeps its part where it is asked."""
    if not axes:
        return part
    # In float32 what has few bytes, such as a scale's gradient; XLA adds up others in their own dtype.
    total = part.astype(jnp.float32) if part.ndim == 1 and part.dtype.itemsize < 4 else part
    for place, over in scattered.items():
        total = lax.psum_scatter(total, over, scatter_dimension=place, tiled=True)
    if rest := tuple(axis for axis in axes if axis not in sum(scattered.values(), ())):
        total = lax.psum(total, rest)
    return total.astype(part.dtype)


def _batch(axis: Any, operands: Any, places: Any, *, run: Any, rule: Rule, types: Any, shared: Shared) -> Any:
    is_mapped = [isinstance(place, int) for place in places]
    operands = [
        jnp.moveaxis(array, place, 0) if each else array
        for array, place, each in zip(operands, places, is_mapped, strict=True)
    ]
    axes = tuple(0 if each else None for each in is_mapped)

    def mapped(cut: Cut | None, *arrays: Any) -> Any:
        # All that `run` sees has the mapped dimension.
        inner = cut and replace(cut, axes_of={name: cut.axes_of[name] for name in cut.axes_of if name in rule.sizes})
        return jax.vmap(partial(run, inner), axes)(*arrays)

    types = tuple(((axis.size, *shape), dtype) for shape, dtype in types)
    params = {"rule": rule.mapped(is_mapped, axis.size), "types": types, "shared": shared}
    return shared_p.bind(*operands, run=mapped, **params), [0] * len(types)


shared_p = Primitive("shared")
"""A call whose work devices share, in programs that XLA partitions."""
shared_p.multiple_results = True
shared_p.def_abstract_eval(lambda *_, types, **params: [ShapedArray(shape, dtype) for shape, dtype in types])
fancy_primitive_batchers[shared_p] = _batch
mlir.register_lowering(shared_p, _lower, cacheable=False)
