"""Calls whose work devices share under explicit mesh axes, where tracing knows how arrays are cut.

The same `Rule` answers as in a program that XLA partitions; what one device computes runs inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax._src import source_info_util
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from pallas_kernels.primitives.cuts import cut_of
from pallas_kernels.primitives.partitioned import differentiated_by, warn_of
from pallas_kernels.primitives.platform import mapped_mesh_axes
from pallas_kernels.primitives.sharded import Shared, computed_among
from pallas_kernels.primitives.shared_call import local_call, place_of


def is_explicit() -> bool:
    """Returns whether all axes of the current mesh are explicit; those of one device do not count beside others."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = {kind for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if size > 1}
    return (kinds or set(mesh.axis_types)) == {AxisType.Explicit} and not mapped_mesh_axes()


@contextmanager
def on_one_device() -> Iterator[None]:
    """Traces without the current mesh, for the same kind of device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    one = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=device)
    # JAX lets a mesh of another size replace none but the empty one.
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(one):
        yield


def by_explicit_axes(shared: Shared) -> Callable[..., Any]:
    """Returns a differentiable function of arrays that the current mesh's explicit axes cut."""

    def bind(run: Any, rule: Any, types: Any, arrays: Sequence[Any]) -> list[Any]:
        mesh = jax.sharding.get_abstract_mesh()
        given = [jax.typeof(array).sharding.spec for array in arrays]
        asked = [each.sharding.spec if rule.primal is not None else PartitionSpec() for each in types]
        cut, specs = cut_of(rule, dict(mesh.shape), [*given, *asked])
        count = len(arrays)
        placed = [
            jax.sharding.reshard(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=False)
        ]
        found = jax.shard_map(
            local_call(run, rule, cut, given, where, notify),
            in_specs=tuple(specs[:count]),
            out_specs=tuple(specs[count:]),
            check_vma=bool(cut.sums),
        )(*placed)
        if rule.primal is None:
            return list(found)
        return [jax.sharding.reshard(each, NamedSharding(mesh, spec)) for each, spec in zip(found, asked, strict=True)]

    def by_axes(kernel: Callable[..., Any], several: Callable[..., Any], *operands: Any, keeps: bool = False) -> Any:
        if not keeps:
            return several(*operands)
        with on_one_device():
            types = jax.eval_shape(lambda *own: computed_among(kernel(*own)[1], own), *shared.call.structs)
        return several(types, *operands)

    traceback = source_info_util.current().traceback
    where, notify = place_of(traceback), partial(warn_of, shared.call.operation, traceback)
    return differentiated_by(by_axes, shared.call, replace(shared, binder=bind))
