"""Makes the table of docs/kernels.md that shows which implementation takes which size.

It traces each operation for an H200 up to the point where dispatch chooses; no GPU is needed. jax-triton counts as
installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import jax
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels import REGISTRY, ArgSpec, ArraySpec, OpSpec, choice
from pallas_kernels.primitives import triton_calls
from pallas_kernels.specs import plain
from xlafuse.bench.results import markdown_table

FEATURES = (1, 127, 1000, 1152, 4097, 128256, 262144)
DTYPES = ("bfloat16", "float16", "float32")
HEADS = ((32, 8), (12, 12), (12, 1), (3, 3))
"""Numbers of query heads and key heads."""
HEAD_SIZES = (2, 64, 80, 96, 128, 256)
_ROWS = 4096
_UNUSUAL = frozenset({"ragged", "extreme", "empty", "long"})


def implementations(op: OpSpec, spec: ArgSpec) -> tuple[str, ...]:
    """Returns the implementations that an H200 can run on these arguments; `implementation=None` takes the first."""
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("_device",), axis_types=(AxisType.Auto,), abstract_device=h200)
    with mock.patch.object(triton_calls, "find_spec", lambda _: True), jax.sharding.use_abstract_mesh(mesh):
        return choice(op.function, **plain(spec.structs())).runnable


def resized(op: OpSpec, features: int, dtype: str, *, rows: int = _ROWS) -> ArgSpec:
    """Returns the operation's first ordinary argument spec, resized to rows of `features` values of `dtype`."""
    spec = next(spec for spec in op.tagged("test") if not spec.tags & _UNUSUAL)
    main = spec.arguments[op.batched[0]]

    def resize(name: str, value: object) -> object:
        if not isinstance(value, ArraySpec) or value.dtype.startswith("uint"):
            return value
        is_row = value.shape[-1:] == main.shape[-1:]
        shape = ((rows,) if name in op.batched else ()) + ((features,) if is_row else ())
        return replace(value, shape=shape, dtype=dtype if value.dtype == main.dtype else value.dtype)

    return ArgSpec(name=f"{features}-{dtype}", arguments={n: resize(n, v) for n, v in spec.arguments.items()})


def _rope_spec(heads: tuple[int, int], head_size: int, dtype: str) -> ArgSpec:
    query, key = (ArraySpec(shape=(2, 8, count, head_size), dtype=dtype) for count in heads)
    positions = ArraySpec(shape=(8,), dtype="int32")
    return ArgSpec(name="", arguments={"query": query, "key": key, "positions": positions})


def row_operations() -> list[OpSpec]:
    """Returns the operations that take rows of any length."""
    others = ("rope", "embedding", "embedding_bag")
    return [op for op in REGISTRY.values() if op.name not in others and op.flops is None]


def markdown() -> str:
    """Makes the tables: by row length, and for rope by number of heads and head size."""
    header = [f"operation, {_ROWS} rows of", *map(str, FEATURES)]
    cells = [[f"`{op.name}`", *(_cell(op, features) for features in FEATURES)] for op in row_operations()]
    lengths = markdown_table(header, cells, "l" * len(header))
    header = ["`rope`, heads of query and key; head size", *map(str, HEAD_SIZES)]
    cells = [[f"{q} and {k}", *(_rope_cell((q, k), size) for size in HEAD_SIZES)] for q, k in HEADS]
    return f"{lengths}\n\n{markdown_table(header, cells, 'l' * len(header))}"


def _cell(op: OpSpec, features: int) -> str:
    return _cell_words({dtype: implementations(op, resized(op, features, dtype)) for dtype in DTYPES})


def _rope_cell(heads: tuple[int, int], head_size: int) -> str:
    return _cell_words(
        {dtype: implementations(REGISTRY["rope"], _rope_spec(heads, head_size, dtype)) for dtype in DTYPES}
    )


def _cell_words(found: Mapping[str, tuple[str, ...]]) -> str:
    """Formats one answer if all dtypes agree, else one for each dtype; "xla" is named if it is the default."""
    answers: dict[str, list[str]] = {}
    for dtype, (first, *others) in found.items():
        names = [first, *(name for name in others if name != "xla")]
        answers.setdefault(", ".join(names), []).append(dtype)
    if len(answers) == 1:
        return next(iter(answers))
    return "; ".join(f"{' and '.join(dtypes)} {answer}" for answer, dtypes in answers.items())
