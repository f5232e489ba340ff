"""The call whose work devices share, in the program that XLA partitions.

XLA asks, while it partitions, how the call's arrays are to be cut. The call's `Rule` answers, and the operation is
traced on one device's arrays, with the kernels that serve those. Equal calls, such as those of a model's layers, are
traced and lowered once for each program.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax._src import source_info_util
from jax._src.custom_partitioning import _CUSTOM_PARTITIONING_CALL_NAME, _sharding_callbacks, _ShardingCallbackInfo
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.interpreters.batching import fancy_primitive_batchers
from jax._src.interpreters.mlir import build_mlir_module_helper, merge_mlir_modules, module_to_bytecode
from jax._src.lib import jax_mlir_ext  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import ShardingContext, parse_flatten_op_sharding
from jax._src.state.discharge import discharge_state
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.cuts import Cut, cut_of, part, summed, text_of_parts, varying
from pallas_kernels.primitives.dimensions import Rule
from pallas_kernels.primitives.overlapped import gather_of
from pallas_kernels.primitives.platform import target_device

PACKAGE = str(Path(__file__).parents[1])
Notify = Callable[[str, str], None]
"""Takes what a call does, and why, for a warning."""
notify: ContextVar[tuple[Notify, str]] = ContextVar("notify", default=(lambda what, why: None, ""))
"""That of the call that is lowered, and the call's place in the program."""
_NONE = AbstractMesh((), ())


def needed(function: Callable[..., Any], *arrays: Any) -> list[Any]:
    """Calls a function without what does not lead to its results: Shardy would give axes to it."""
    closed = jax.make_jaxpr(function)(*arrays)
    if closed.effects:  # references that a kernel makes for itself, to update arrays in place
        closed = discharge_state(closed)
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*arrays)


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


def _lower(ctx: Any, *values: Any, run: Callable[..., Any], rule: Rule, types: Any, shared: Any, text: str) -> Any:
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

    warn, where = notify.get()
    callback = _ShardingCallbackInfo(
        None,
        partial(_partition, run, rule, shared, warn, where, copy_context(), {}),
        spec,
        operands,
        results,
        None,
        context,
        mesh,
        (),
    )
    # JAX takes an object's identity, which differs in each process, so that its compile cache would never hit.
    text += " overlaps" * rule.overlaps
    key = hashlib.sha256(f"{shared.label} {text} {mesh} {context.platforms}".encode()).hexdigest()
    _sharding_callbacks[key.encode()] = callback
    context.add_keepalive(callback)  # that of the last of equal calls serves all
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
    shared: Any,
    warn: Notify,
    where: str,
    context: Context,
    known: dict[tuple[PartitionSpec, ...], _OneDevice],
    mesh: AbstractMesh,
    operands: Any,
    results: Any,
) -> tuple[AbstractMesh, Callable[..., Any], Any, Any]:
    """Answers how a call's arrays are cut, and returns what one device computes. known: for equal calls before."""
    asked = tuple(each.sharding.spec for each in (*operands, *results))
    cut, specs = cut_of(rule, dict(mesh.shape), asked)
    manual = mesh.update(axis_types=(AxisType.Manual,) * len(mesh.axis_names))

    def local(call: Callable[..., Any], *arrays: Any) -> Any:
        # JAX lets a mesh of another size replace none but the empty one.
        with use_abstract_mesh(_NONE), use_abstract_mesh(manual), jax_config._check_vma(bool(cut.sums)):
            return context.copy().run(call, *arrays)

    def traced(call: Callable[..., Any], specs: Sequence[PartitionSpec]) -> _OneDevice:
        parts = (
            jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(each.shape), each.dtype)
            for each, spec in zip(operands, specs, strict=False)
        )
        jaxpr = jax.make_jaxpr(partial(local, call), axis_env=[*mesh.shape.items()])(*parts)
        return _OneDevice(jaxpr=jaxpr, specs=specs)

    can_travel = shared.call.dimensions.in_place is not None
    gather = gather_of(rule, cut, dict(mesh.shape), asked, len(shared.results[0])) if can_travel else None
    if gather is not None and asked not in known:
        run_ring = partial(gather.run, rule, run, shared.call.in_place)
        ring = local_call(run_ring, rule, cut, asked, where, warn, str(gather))
        with contextlib.suppress(NotImplementedError):  # without a kernel that takes the blocks, rows are gathered
            known[asked] = traced(ring, gather.specs(rule, cut, specs))
    if asked not in known:
        known[asked] = traced(local_call(run, rule, cut, asked, where, warn), specs)
    computed = known[asked]
    places = [NamedSharding(mesh, spec) for spec in computed.specs]
    run_once = partial(_one_device_p.bind, computed=computed)
    return mesh, run_once, tuple(places[len(operands) :]), tuple(places[: len(operands)])


@dataclass(eq=False)
class _OneDevice:
    """What one device computes of a call. specs: of its arrays. module: as it was lowered, once it has been.

    Lowering a kernel takes a second, and XLA asks anew for each call of a program.
    """

    jaxpr: ClosedJaxpr
    specs: Sequence[PartitionSpec]
    module: bytes | None = None


def _lower_one_device(ctx: Any, *values: Any, computed: _OneDevice) -> Any:
    context = ctx.module_context
    if computed.module is None:
        module = build_mlir_module_helper(
            computed.jaxpr,
            name="one_device",
            platforms=context.platforms,
            backend=context.backend,
            axis_context=context.axis_context,
        )
        computed.module = module_to_bytecode(module)
    module = ir.Module.parse(computed.module, context.context)
    name = merge_mlir_modules(context.module, "one_device", module, dst_symtab=context.symbol_table)
    return jax_mlir_ext.inlined_func_call(context.symbol_table[name].operation, values)


def place_of(traceback: Any) -> str:
    """Returns file and line of the innermost frame outside JAX and this package."""
    frames = source_info_util.user_frames(traceback)
    places = (f"{each.file_name}:{each.start_line}" for each in frames if not each.file_name.startswith(PACKAGE))
    return next(places, "an unknown line")


def local_call(
    run: Callable[..., Any], rule: Rule, cut: Cut, asked: Sequence[Any], where: str, warn: Notify, note: str = ""
) -> Callable[..., tuple[Any, ...]]:
    """Returns what one device computes of its parts, where all mesh axes are manual.

    Warns of the mesh axes along which devices repeat the work. asked: the partition specs of the arrays. note: what
    `recorded_choices` says besides.
    """
    for axis, labels in rule.gathered(asked, cut.axes_of).items():
        what = f"gathers {', '.join(dict.fromkeys(labels))} over the mesh axis {axis!r}"
        warn(what, "the operation cannot be cut there, so that devices along this axis repeat its work")

    text = "; ".join([text_of_parts(rule, cut, asked), *filter(None, [note])]) if rule.labels else ""

    def local(*arrays: Any) -> tuple[Any, ...]:
        if cut.sums:
            arrays = tuple(varying(each, cut.own(own)) for each, own in zip(arrays, rule.operands, strict=True))
        with assigned(part, (text, where)):
            computed = needed(partial(run, cut), *arrays)
        if rule.primal is None:
            return tuple(computed)
        pairs = zip(computed, rule.results, cut.scattered, strict=True)
        return tuple(summed(each, cut.lacked(own), scattered) for each, own, scattered in pairs)

    return local


def _batch(axis: Any, operands: Any, places: Any, *, run: Any, rule: Rule, types: Any, shared: Any, text: str) -> Any:
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
    params["text"] = f"vmap {axis.size} {axes} {text}"
    return shared_p.bind(*operands, run=mapped, **params), [0] * len(types)


_one_device_p = Primitive("one_device")
"""A jaxpr that is lowered once for all programs that XLA asks for."""
_one_device_p.multiple_results = True
_one_device_p.def_abstract_eval(
    lambda *_, computed: [ShapedArray(each.shape, each.dtype) for each in computed.jaxpr.out_avals]
)
mlir.register_lowering(_one_device_p, _lower_one_device)

shared_p = Primitive("shared")
"""A call whose work devices share, in programs that XLA partitions."""
shared_p.multiple_results = True
shared_p.def_abstract_eval(lambda *_, types, **params: [ShapedArray(shape, dtype) for shape, dtype in types])
fancy_primitive_batchers[shared_p] = _batch
mlir.register_lowering(shared_p, _lower, cacheable=False)
