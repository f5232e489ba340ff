"""Lowers a function to StableHLO for a GPU that need not exist."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hlo_analysis.capture.answers import answer_cudnn_checks, answer_for_callbacks
from hlo_analysis.capture.meshes import (
    NEEDS_DEVICES,
    NEEDS_MESH,
    OTHER_DEVICES,
    check_cuts,
    devices_of,
    is_cut,
    mesh_of_one,
    name_target_in_meshes,
    under_mesh_of_one,
    without_devices,
)
from hlo_analysis.capture.module_scopes import name_modules
from hlo_analysis.capture.ordering import in_post_order
from hlo_analysis.errors import CaptureError
from hlo_analysis.targets import Target, load_target

Mode = Literal["forward", "grad"]

# A block is tens of kilobytes: megabytes are constants. 64 MiB of them made a 2 s compilation take 25 s.
_LARGE_BYTECODE = 16 << 20
_LIBRARIES = {"jax", "jaxlib", "flax", "numpy", "functools", "contextlib", "importlib", "hlo_analysis"}
"""Packages whose frames are not the user's; `leave_out_packages` adds to them."""
_HOST_MEMORY = ("pinned_host", "unpinned_host")


@functools.cache
def leave_out_frames(file: str) -> None:
    """No instruction is to name this file, which calls `capture`, among its callers: it is not the user's."""
    source_info_util.register_exclusion(file)


def leave_out_packages(*names: str) -> None:
    """Errors are to name no line of these packages as the user's."""
    _LIBRARIES.update(names)


for _name in ("lowering.py", "api.py", "meshes.py", "module_scopes.py", "patches.py"):
    leave_out_frames(str(Path(__file__).with_name(_name)))


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A program ready to be compiled."""

    bytecode: bytes
    """StableHLO."""
    function: str
    arguments: tuple[str, ...]
    """'name: dtype[shape]' of each array argument."""
    seconds: float = 0.0
    """Of this thread, to trace and lower it: other threads' work does not count."""
    devices: int = 1
    """How many the program is spread over, by a mesh of its own."""
    keepalive: Any = None
    """What must live until it is compiled: JAX's weakly kept answers to how calls of Python cut their arrays."""
    values: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Integers and booleans that were given as arrays, by their position among the program's arguments."""

    def save_values(self, file: Path) -> None:
        """Saves `values` in NumPy's format."""
        np.savez(file, allow_pickle=False, **{str(place): value for place, value in self.values.items()})

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats for a report of this program."""
        notes: list[str] = []
        if len(self.bytecode) >= _LARGE_BYTECODE:
            notes.append(
                f"The function closes over {len(self.bytecode) >> 20} MiB of arrays, which are compiled in as "
                "constants: pass them as arguments to compile faster and to have XLA treat them as data."
            )
        if self.devices > 1:
            notes.append(
                f"The program is spread over {self.devices} devices: all numbers are those of one. A collective takes "
                "the time of what it sends to the others at the peak rate of the links of one host, where the target's "
                "is known; what it waits for the others is not counted."
            )
        return tuple(notes)


def lower(
    fn: Callable[..., Any],
    shapes: Sequence[Any],
    *,
    target: Target,
    mode: Mode = "forward",
    lower_context: AbstractContextManager[Any] | None = None,
) -> Lowered:
    """Traces `fn` and lowers it for the target, under an abstract mesh of one such device.

    A function that brings a mesh of its own (`shard_map`, arguments cut over one) is traced without ours; inside
    `shard_map` a mesh that names no GPU names the target's.

    Raises:
      CaptureError: `fn` does not trace with these shapes, or does not lower for the target.
    """
    from jax._src.interpreters import mlir

    started = time.thread_time()
    name = function_name(fn)
    platform = "cpu" if target.kind == "cpu" else "cuda"
    alone = mesh_of_one(target) if platform == "cuda" else None
    in_mesh = target if target.config_text else load_target("h200")  # described devices stand for attached ones

    def arguments_on(devices: Callable[[int], Sequence[Any]] | None) -> tuple[Any, ...]:
        place = functools.partial(abstract, alone=alone, devices=devices)
        return tuple(jax.tree.map(place, shape) for shape in shapes)

    arguments = arguments_on(None)
    described = describe_arguments(fn, arguments)
    check_cuts(zip((each.rpartition(": ")[0] for each in described), jax.tree.leaves(arguments), strict=True))
    if open_sizes := sorted({str(size) for leaf in jax.tree.leaves(arguments) for size in _open_sizes(leaf)}):
        raise CaptureError(
            f"{name} has arguments ({', '.join(described)}) with sizes that are left open, {', '.join(open_sizes)}: "
            "expected numbers, since XLA compiles for one size"
        )
    try:
        with contextlib.ExitStack() as stack:
            if platform == "cuda":
                stack.enter_context(answers_of(target))
            stack.enter_context(name_modules())
            if lower_context is not None:
                stack.enter_context(lower_context)
            cut = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(arguments) if is_cut(leaf)]
            # Described devices have no memories of the host's.
            spreads = bool(cut) and platform == "cuda" and not set(cut) & set(_HOST_MEMORY)
            placed = arguments_on(functools.partial(devices_of, in_mesh)) if spreads else arguments
            lowered = _lowered_over_meshes(alone, fn, placed, arguments, mode)
            module = lowered.compiler_ir("stablehlo")
            devices = _spread_over(module)
            bytecode = mlir.module_to_bytecode(module)
            if platform == "cuda":
                bytecode = in_post_order(bytecode)
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        advice = "pass what changes its state as an argument: capture(lambda model, x: model(x), model, x)"
        raise CaptureError(
            f"{name} could not be traced for {target.name} with arguments ({', '.join(described) or 'none'}), "
            f"mode {mode!r}: {tracing_error(error, advice)}"
        ) from error
    seconds = time.thread_time() - started
    return Lowered(
        bytecode=bytecode,
        function=name,
        arguments=described,
        seconds=seconds,
        devices=devices,
        keepalive=lowered,
        values=_values(shapes, lowered),
    )


def tracing_error(error: BaseException, nnx_advice: str) -> str:
    """What a failed trace raised, with the user's line; `nnx_advice` goes to a flax.nnx module that changes state.

    JAX also names the traced function and its argument. Those may be a wrapper's, and the user's line tells more.
    """
    first = str(error).strip().split("\n\n")[0].splitlines()
    reason = "\n".join(line for line in first if not line.startswith("The error occurred while tracing the function"))
    if type(error).__name__ == "TraceContextError":
        reason += f"; {nnx_advice}"
    place = user_place(error)
    return f"{type(error).__name__}{reason and f': {reason}'}" + (f"\n  at {place}" if place else "")


def user_place(error: BaseException) -> str:
    """Names the innermost frame of the user's, as 'file.py:3, in function: code'; '' where there is none."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    if not frames:
        return ""
    frame, line = frames[-1]
    file = Path(frame.f_code.co_filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    code = linecache.getline(str(file), line).strip()
    return f"{shown}:{line}, in {frame.f_code.co_name}{code and f': {code}'}"


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES


def _lowered_over_meshes(
    alone: AbstractMesh | None, fn: Callable[..., Any], placed: tuple[Any, ...], arguments: tuple[Any, ...], mode: Mode
) -> Any:
    """The function lowered with arguments that are `placed` on devices, or on none where its own meshes need that."""
    try:
        return _lowered_for(alone, fn, placed, mode)
    except ValueError as error:
        if OTHER_DEVICES not in str(error) and NEEDS_DEVICES not in str(error):
            raise
    try:
        return _lowered_for(alone, fn, arguments, mode)
    except ValueError as error:
        if NEEDS_DEVICES not in str(error):
            raise
    with without_devices():
        return _lowered_for(alone, fn, arguments, mode)


def _lowered_for(alone: AbstractMesh | None, fn: Callable[..., Any], arguments: tuple[Any, ...], mode: Mode) -> Any:
    """The function lowered for one device `alone`, for the meshes that the function brings, or for the CPU."""
    platform = "cpu" if alone is None else "cuda"
    try:
        return under_mesh_of_one(alone, lambda: _lowered(fn, arguments, mode, platform))
    except RuntimeError as error:
        cut = next(filter(is_cut, jax.tree.leaves(arguments)), None)
        if NEEDS_MESH not in str(error) or cut is None:
            raise
    with jax.sharding.use_abstract_mesh(cut.sharding.mesh.abstract_mesh):  # as a caller does by jax.set_mesh
        return _lowered(fn, arguments, mode, platform)


def _lowered(fn: Callable[..., Any], arguments: tuple[Any, ...], mode: Mode, platform: str) -> Any:
    """The function, or its gradient, lowered by JAX."""
    if mode == "grad":
        program, cotangents = gradient(fn, arguments)
        # A gradient lies as its argument does: an optimizer puts the two together.
        floats = [leaf for leaf in jax.tree.leaves(arguments) if _is_float(leaf)]
        places = [NamedSharding(leaf.sharding.mesh, leaf.sharding.spec) if is_cut(leaf) else None for leaf in floats]
        given: dict[str, Any] = {"out_shardings": (None, tuple(places))} if any(places) else {}
        traced = jax.jit(program, static_argnums=_statics(arguments), **given).trace(*arguments, cotangents)
    else:
        jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
        traced = jitted.trace(*arguments)
    return traced.lower(lowering_platforms=(platform,))


def _values(given: Sequence[Any], lowered: Any) -> dict[int, np.ndarray]:
    """The integers and booleans among the given arrays, by position in the lowered program, which drops unused ones."""
    leaves = jax.tree.leaves([each for each in given if not isinstance(each, (int, str))])
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])
    return {
        place: np.asarray(leaves[index])
        for place, index in enumerate(kept)
        if index < len(leaves)
        and isinstance(leaves[index], (np.ndarray, np.generic, jax.Array))
        and np.dtype(leaves[index].dtype).kind in "iub"
    }


def _spread_over(module: Any) -> int:
    """Devices of the largest mesh; of an abstract one JAX does not write the number into the module itself."""
    from jaxlib.mlir import ir

    meshes = [str(operation) for operation in module.body.operations if operation.operation.name == "sdy.mesh"]
    sizes = [prod(int(size) for size in re.findall(r'"=(\d+)', mesh.partition("{")[0])) for mesh in meshes]
    count = max([int(module.operation.attributes["mhlo.num_partitions"]), *sizes])
    with module.context:
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)
    return count


def gradient(fn: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Callable[..., Any], Any]:
    """What a training step does with `fn`: its outputs, and the cotangents of its floating-point arguments.

    Gives the function `(*arguments, cotangents) -> (outputs, gradients)` and the shapes of `cotangents`, one for each
    floating-point output. The cotangents are an argument, not ones, so that XLA cannot fold them away; the outputs are
    returned because the next layer needs them, so that XLA cannot drop the end of the forward pass. Gradients come for
    each floating-point argument leaf, in order. Arguments that are plain integers or strings stay what they are.
    """
    leaves, tree = jax.tree.flatten(tuple(arguments))
    is_float = [_is_float(leaf) for leaf in leaves]
    if not any(is_float):
        raise CaptureError(
            f"{function_name(fn)} has no floating-point argument to take a gradient of; use mode='forward'"
        )
    if statics := _statics(arguments):
        outputs = jax.jit(lambda *values: fn(*values), static_argnums=statics).eval_shape(*arguments)
    else:
        outputs = jax.eval_shape(fn, *arguments)
    cotangents = [leaf for leaf in jax.tree.leaves(outputs) if _is_float(leaf)]
    if not cotangents:
        raise CaptureError(
            f"{function_name(fn)} has no floating-point output to take a gradient of; use mode='forward'"
        )

    def program(*operands: Any) -> Any:
        *values, cotangent = operands
        flat = jax.tree.leaves(tuple(values))

        def differentiated(*floats: Any) -> tuple[list[Any], Any]:
            given = iter(floats)
            merged = [next(given) if wanted else leaf for wanted, leaf in zip(is_float, flat, strict=True)]
            result = fn(*jax.tree.unflatten(tree, merged))
            return [leaf for leaf in jax.tree.leaves(result) if _is_float(leaf)], result

        floats = [leaf for wanted, leaf in zip(is_float, flat, strict=True) if wanted]
        _, pullback, result = jax.vjp(differentiated, *floats, has_aux=True)
        return result, pullback(cotangent)

    program.__name__ = program.__qualname__ = f"{_identifier(function_name(fn))}_grad"
    names = [*_parameter_names(fn, len(arguments)), "cotangents"]
    if len(set(names)) == len(names):  # names that the HLO's parameters then carry
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        program.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return program, cotangents


def _statics(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Positions of arguments that a function may take for static ones."""
    return tuple(index for index, argument in enumerate(arguments) if isinstance(argument, (int, str)))


def function_name(fn: Callable[..., Any]) -> str:
    """A name for messages: the function's own, or its type's."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)
    return str(name) if name else type(fn).__name__


def describe_arguments(fn: Callable[..., Any], arguments: Sequence[Any]) -> tuple[str, ...]:
    """'name: dtype[shape]' of each array argument; a leaf of a tree is named by its path."""
    from jax._src.core import shaped_abstractify

    described: list[str] = []
    for name, argument in zip(_parameter_names(fn, len(arguments)), arguments, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            try:
                kind = shaped_abstractify(leaf).str_short(short_dtypes=True)
            except TypeError:
                kind = repr(leaf)
            described.append(f"{name}{jax.tree_util.keystr(path)}: {kind}")
    return tuple(described)


@contextlib.contextmanager
def answers_of(target: Target) -> Iterator[None]:
    """Within the block, and in this thread only, JAX lowers for the target, a GPU that need not be there."""
    with answer_cudnn_checks(target), answer_for_callbacks(), name_target_in_meshes(target):
        yield


def abstract(leaf: Any, alone: AbstractMesh | None, devices: Callable[[int], Sequence[Any]] | None = None) -> Any:
    """Shape, dtype and cut: an array's values and its place on a device must not enter the program.

    The cut over a mesh of several devices stays: it decides what each of them computes. The mesh is one of as many of
    the `devices`, or of none. So does the host's memory, from which a GPU (`alone` is a mesh of it) has the array
    brought.
    """
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    sharding: Any = getattr(leaf, "sharding", None)
    kind = getattr(sharding, "memory_kind", None)
    kind = kind if alone is not None and kind in _HOST_MEMORY else None
    if is_cut(leaf):
        mesh: Any = sharding.mesh.abstract_mesh
        if devices is not None:
            grid = np.array(devices(mesh.size)).reshape(mesh.axis_sizes)
            mesh = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
        place = NamedSharding(mesh, sharding.spec, memory_kind=kind)
    else:
        place = NamedSharding(alone, PartitionSpec(), memory_kind=kind) if alone and kind else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _open_sizes(leaf: Any) -> list[Any]:
    """Sizes of an array that are symbols, as those of `jax.export`."""
    return [size for size in getattr(leaf, "shape", ()) if not isinstance(size, (int, np.integer))]


def _is_float(leaf: Any) -> bool:
    return not isinstance(leaf, str) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    names: list[str] = []
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        else:
            break
    return [names[index] if index < len(names) else f"argument_{index}" for index in range(count)]


def _identifier(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name).strip("_") or "function"
