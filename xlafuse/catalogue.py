"""The operations of `pallas_kernels`, as catalogues that remedies name them from.

`KERNELS` knows a program's launches alone, and refuses only what no operand among them would let a kernel take.
`catalogue_of` knows what `xlafuse.fuse` finds in the program's function, and says what that says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hlo_analysis.capture.meshes import traced_for_one
from hlo_analysis.catalogue import Catalogue, Kernel
from hlo_analysis.hlo import Shape
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.loading import DTYPES
from hlo_analysis.patterns.attention_scores import elements
from hlo_analysis.patterns.launch_patterns import (
    adds_bias,
    factors,
    is_batched,
    is_product,
    shape_of,
)
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.targets import load_target

if TYPE_CHECKING:
    from pallas_kernels import Choice
    from xlafuse.findings import Finding

_HOPPER = (9,)
_ORDINARY = 1024
"""A size of which no kernel makes anything, where the launches do not tell it."""


def _struct(shape: Shape) -> jax.Array | None:
    """Returns a value's shape and dtype, which is all that a kernel's check reads; None for a dtype of few bits."""
    name = DTYPES.get(shape.element_type, "")
    known = name in ("bool", "bfloat16") or name in np.sctypeDict
    return jax.ShapeDtypeStruct(shape.dimensions, name) if known else None  # pyright: ignore[reportReturnType]


@functools.cache
def _choice(name: str, *arrays: Any, **options: Any) -> Choice | str:
    """Returns what an operation takes for these arrays on a Hopper GPU, or why it rejects them."""
    import pallas_kernels

    with traced_for_one(load_target("h200")):
        try:
            return pallas_kernels.choice(getattr(pallas_kernels, name), *arrays, **options)
        except (TypeError, ValueError) as error:
            return str(error).removeprefix(f"{name}: ")


def _refusal(name: str, *arrays: Any, **options: Any) -> str | None:
    """Returns why an operation's kernel does not take these arrays, or None."""
    made = _choice(name, *arrays, **options)
    return made if isinstance(made, str) else made.reasons["mosaic"]


def _all_refused(refusals: Iterable[str | None]) -> str | None:
    """Returns the first reason if there is one for everything, else None."""
    reasons = [*refusals]
    return reasons[0] if reasons and all(reasons) else None


def _array(*sizes: int, dtype: Any) -> jax.Array:
    return jax.ShapeDtypeStruct(sizes, dtype)  # pyright: ignore[reportReturnType]


def _products_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Returns why the kernels can multiply as none of the products among the launches does."""
    return _all_refused(_product_unsupported(launch) for launch in launches if is_product(launch))


def _product_unsupported(product: LaunchRow) -> str | None:
    """Returns why the kernels cannot multiply as a product does, whichever factor is w."""
    if is_batched(product):
        return "the kernels multiply by a single matrix"
    if (known := factors(product)) is None:
        return None
    left, right, dimensions = known
    first, second = _matrix(left, dimensions.lhs_contracting), _matrix(right, dimensions.rhs_contracting)
    if first is None or second is None:
        return None
    return _all_refused(_refusal("linear", _turned(x), w) for x, w in ((first, second), (second, first)))


def _matrix(shape: Shape, contracting: Sequence[int]) -> jax.Array | None:
    """Returns a factor as (features, outputs)."""
    features = prod(shape.dimensions[axis] for axis in contracting)
    struct = _struct(shape)
    return None if struct is None else _array(features, shape.element_count // features, dtype=struct.dtype)


def _turned(matrix: jax.Array) -> jax.Array:
    return _array(*matrix.shape[::-1], dtype=matrix.dtype)


def _loss_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Returns why linear_cross_entropy cannot take the product, or would leave it to XLA."""
    if reason := _products_unsupported(launches):
        return reason
    products = [launch for launch in launches if is_product(launch)]
    if len(products) != 1 or (known := factors(products[0])) is None:
        return None
    logits = elements(products[0].outputs[0])
    if any(adds_bias(launch, logits) for launch in launches):
        return "it takes no bias; XLA adds that of the logits, x @ w + bias, in the product's epilogue"
    left, right, dimensions = known
    sides = [_matrix(left, dimensions.lhs_contracting), _matrix(right, dimensions.rhs_contracting)]
    # XLA splits long reductions: their lengths divide the vocabulary, and their results are some for each row.
    found = [each for launch in launches for each in _reductions(launch) if each[1] == logits]
    pairs = [
        (x, w)
        for x, w in (sides, sides[::-1])
        if x is not None and w is not None and found
        if all(w.shape[1] % length == 0 and whole // length % x.shape[1] == 0 for length, whole in found)
    ]
    if len(pairs) != 1:
        return None
    ((hidden, w),) = pairs
    (features, rows), vocabulary = hidden.shape, w.shape[1]
    if reason := _refusal("linear_cross_entropy", _turned(hidden), w, _array(rows, dtype="int32")):
        return reason
    # The operation's choice does not tell a call that is the kernel's only where no gradient is taken.
    from pallas_kernels.ops.linear_cross_entropy.config import is_preferred, is_preferred_forward

    has_gradient = any("jvp(" in name for launch in launches for name in launch.facts.all_op_names)
    is_best = is_preferred(rows, vocabulary, features, keeps_gradients=True)
    is_best = is_best or (not has_gradient and is_preferred_forward(rows, vocabulary))
    return None if is_best else "XLA was measured to be faster"


def _rows_unsupported(name: str, launches: Sequence[LaunchRow]) -> str | None:
    """Returns why the kernel for rows can take none of the arrays that the launches read."""
    lengths = [length for launch in launches for length, _ in _reductions(launch)]
    length = max(lengths, default=_ORDINARY)
    return _all_refused(_row_refusal(name, length, struct.dtype) for struct in _large(launches) if struct is not None)


def _row_refusal(name: str, length: int, dtype: Any) -> str | None:
    x, vector = _array(_ORDINARY, length, dtype=dtype), _array(length, dtype=dtype)
    others = {"rms_norm": [vector], "layer_norm": [vector, vector], "cross_entropy": [_array(_ORDINARY, dtype="int32")]}
    return _refusal(name, x, *others.get(name, ()))


def _rotation_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Returns why rope takes none of the large arrays that have axes of heads and of their features."""
    known = [struct for struct in _large(launches) if struct is not None and struct.ndim > 2]
    arrays = [_array(1, *struct.shape[-3:], dtype=struct.dtype) for struct in known]
    return _all_refused(_refusal("rope", x, x, _array(x.shape[1], dtype="int32")) for x in arrays)


def _large(launches: Sequence[LaunchRow]) -> list[jax.Array | None]:
    """Returns the largest arrays that the launches read; None in place of one of few bits."""
    shapes = [shape_of(value.shape) for launch in launches for value in launch.inputs]
    largest = max((shape.element_count for shape in shapes), default=0)
    return [_struct(shape) for shape in shapes if 2 * shape.element_count > largest]


def _features_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Returns why batch_norm can normalize each feature along none of the largest array's axes."""
    largest = max((x for x in _large(launches) if x is not None), key=lambda x: x.size, default=None)
    if largest is None:
        return None
    vectors = (_array(size, dtype="float32") for size in sorted(largest.shape, reverse=True))
    made = ((_array(_ORDINARY, vector.size, dtype=largest.dtype), vector, vector) for vector in vectors)
    return _all_refused(_refusal("batch_norm", *arrays) for arrays in made)


def _reductions(launch: LaunchRow) -> list[tuple[int, int]]:
    """Returns how many values each reduction of a launch puts together, and how many it reads."""
    found = [(launch.facts.operand(found, 0), integers(found, "dimensions")) for found in launch.facts.of("reduce")]
    return [
        (prod(whole.shape.dimensions[axis] for axis in axes), whole.shape.element_count)
        for whole, axes in found
        if whole is not None
    ]


def _sums_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Returns why the gradient of `embedding` gains nothing over the scatters of these launches."""
    scatters = [(launch, each) for launch in launches for each in launch.facts.of("scatter")]
    updates = [launch.facts.operand(each, len(each.operands) - 1) for launch, each in scatters]
    wide = any(each is not None and each.shape.element_type not in ("bf16", "f16") for each in updates)
    return "XLA adds float32 rows atomically, which is as fast" if wide else None


def _factors_unsupported(name: str, launches: Sequence[LaunchRow]) -> str | None:
    """Returns why the kernels for heads, or groups of rows, can take the dtype of no product's factor."""
    shapes = [shape for launch in launches if is_product(launch) for shape in (factors(launch) or ())[:2]]
    dtypes = {struct.dtype for shape in shapes if (struct := _struct(shape)) is not None}
    if name == "attention":
        heads = (_array(1, 64, 1, 64, dtype=dtype) for dtype in dtypes)
        return _all_refused(_refusal(name, x, x, x) for x in heads)
    groups = [(_array(_ORDINARY, _ORDINARY, dtype=t), _array(1, _ORDINARY, _ORDINARY, dtype=t)) for t in dtypes]
    return _all_refused(_refusal(name, x, w, _array(1, dtype="int32")) for x, w in groups)


Check = Callable[[Sequence[LaunchRow]], str | None]
_CHECKS: dict[str, Check] = {
    **{name: functools.partial(_factors_unsupported, name) for name in ("attention", "grouped_linear")},
    "batch_norm": _features_unsupported,
    "embedding": _sums_unsupported,
    "linear_cross_entropy": _loss_unsupported,
    "lora_linear": lambda launches: None,  # which of its three products is x @ w, the launches do not tell
    "padded_product": lambda launches: None,
    "rope": _rotation_unsupported,
    **{
        name: functools.partial(_rows_unsupported, name)
        for name in ("cross_entropy", "layer_norm", "rms_norm", "softmax")
    },
    **dict.fromkeys(
        ("gated_linear", "linear", "linear_residual_norm", "norm_linear", "quantized_linear"), _products_unsupported
    ),
}


_CALLS = {
    "attention": "y = attention(query, key, value)  # is_causal=True where a query sees no later key",
    "batch_norm": "y, mean, variance = batch_norm(x, scale, bias)",
    "cross_entropy": "losses = cross_entropy(logits, labels)",
    "embedding": "rows = embedding(table, ids)",
    "gated_linear": 'y = gated_linear(x, w_gate, w_up, activation="silu")',
    "grouped_gated_linear": 'y = grouped_gated_linear(x, w_gate, w_up, group_sizes, activation="silu")',
    "grouped_linear": "y = grouped_linear(x, w, group_sizes)  # where jax.lax.ragged_dot was",
    "layer_norm": "y = layer_norm(x, scale, bias)\n"
    "# or of a sum, which it returns too:\n"
    "y, summed = layer_norm(x, scale, bias, residual=residual)",
    "linear": "y = linear(x, w, bias=bias, activation=activation, residual=residual)",
    "linear_cross_entropy": "losses = linear_cross_entropy(hidden, w, labels)",
    "linear_residual_norm": "y, mean_square = linear_residual_norm(x, w, residual=residual)",
    "lora_linear": "y = lora_linear(x, w, a, b, alpha=alpha)",
    "norm_linear": "y = norm_linear(x, w, norm=norm)",
    "quantized_linear": "y = quantized_linear(x, w)",
    "rms_norm": "y = rms_norm(x, scale)\n"
    "# or of a sum, which it returns too:\n"
    "y, summed = rms_norm(x, scale, residual=residual)",
    "rope": "query, key = rope(query, key, positions, theta=theta)",
    "softmax": "y = softmax(x)",
}


def _kernel(name: str, pattern: str, unsupported: Check, **told: Callable[[Sequence[LaunchRow]], str]) -> Kernel:
    """Returns the entry of an operation. told: the entry's `note` and `call`."""
    usual = _CALLS.get(name, "fn = xlafuse.fuse(fn)  # which calls it here")
    code = "" if name == "padded_product" else f"from xlafuse.kernels import {name}\n\n{usual}"
    return Kernel(
        name=name,
        pattern=pattern,
        package="pallas_kernels",
        compute_capabilities=_HOPPER,
        unsupported=unsupported,
        code=code,
        **told,
    )


KERNELS = tuple(_kernel(name, name, unsupported) for name, unsupported in _CHECKS.items())
"""One entry an operation that covers a pattern of the analyzer; `analyze(..., catalogue=KERNELS)`."""


def catalogue_of(findings: Sequence[Finding] | None) -> Catalogue:
    """Returns the operations with what `fuse` finds at the lines of launches.

    A pattern names its own operation where `fuse` takes it, else another one that `fuse` takes for all the launches;
    else its own operation says why `fuse` does not take it. Operations that `fuse` does not search for, and lines of
    which it says nothing, are left to `KERNELS`.
    """
    if findings is None:
        return KERNELS
    from xlafuse.fusion.spellings import operations

    sought = operations()
    taken = dict.fromkeys(each.operation for each in findings if each.outcome == "taken")
    found: list[Kernel] = []
    for own in KERNELS:
        if own.name not in sought:
            found.append(own)
            continue
        for name in (own.name, *(name for name in taken if name != own.name), ""):
            facts = _Facts(findings=findings, name=name or own.name, pattern=own.name, is_last=not name)
            found.append(_kernel(facts.name, own.name, facts.unsupported, note=facts.note, call=facts.call))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What `fuse` finds of one operation, where the analyzer sees the pattern of an operation.

    is_last: whether no other operation is left to ask, so that one may be named that `fuse` says nothing of.
    """

    findings: Sequence[Finding]
    name: str
    pattern: str
    is_last: bool

    def unsupported(self, launches: Sequence[LaunchRow]) -> str | None:
        """Returns why the operation cannot take the place of the launches, or None if it can."""
        lines = self._lines(launches)
        if self._taken(lines) is not None:
            return None
        if not self.is_last:
            return f"fuse does not call {self.name} here"
        near = self._near(lines, self.name)
        if near is None:
            from xlafuse.fusion.spellings import PARTS

            parts = (self._near(lines, part) for part in PARTS.get(self.name, ()))
            near = next((part for part in parts if part is not None and part.outcome == "refused"), None)
        return _CHECKS[self.pattern](launches) if near is None else _why_not(near, self.name)

    def note(self, launches: Sequence[LaunchRow]) -> str:
        """Returns what allows `fuse` to take the launches, if it needs an allowance."""
        site = self._taken(self._lines(launches))
        return f"fuse needs an allowance: {site.text}" if site and site.outcome == "refused" else ""

    def call(self, launches: Sequence[LaunchRow]) -> str:
        """Returns the call that `fuse` puts there, as code; '' where it needs an allowance."""
        site = self._taken(self._lines(launches))
        if site is None or site.outcome != "taken":
            return ""
        return f"from xlafuse.kernels import {site.operation}\n\n{site.text}"

    def _lines(self, launches: Sequence[LaunchRow]) -> list[frozenset[str]]:
        files = {line.rpartition(":")[0] for each in self.findings for line in each.lines}
        return [_lines_of(launch, files) for launch in launches]

    def _taken(self, lines: Sequence[frozenset[str]]) -> Finding | None:
        """Returns the site that takes the launches; of the pattern's own operation it need not take the first.

        A product before an operation on rows stays a product. Of attention the launches are those of the whole program.
        Launches of XLA's own making have no line.
        """
        own = self.name == self.pattern
        needed = [some for some in (lines[1:] if own and len(lines) > 1 else lines) if some]
        enough = any if self.pattern == "attention" else all
        fitting = (
            each
            for each in self.findings
            if each.operation == self.name
            and (each.outcome == "taken" or (own and each.is_allowed))
            and needed
            and enough(each.lines & some for some in needed)
        )
        return max(fitting, key=functools.partial(_shared, lines), default=None)

    def _near(self, lines: Sequence[frozenset[str]], operation: str) -> Finding | None:
        """Returns what is said of an operation at the launches, in most lines."""
        found = (each for each in self.findings if each.operation == operation and _shared(lines, each))
        return max(found, key=functools.partial(_shared, lines), default=None)


def _why_not(near: Finding, name: str) -> str:
    if near.outcome == "refused":
        return near.text if near.operation == name else f"{near.operation}: {near.text}"
    if near.outcome == "left":
        return f"the operation itself leaves it to XLA: {near.text}"
    return "fuse calls it for a part of this alone"


def _shared(lines: Sequence[frozenset[str]], finding: Finding) -> int:
    return sum(len(finding.lines & some) for some in lines)


def _lines_of(launch: LaunchRow, files: set[str]) -> frozenset[str]:
    """Returns the innermost lines in some files that a launch's instructions come from."""
    found = set() if launch.source is None else {launch.source}
    for instruction in launch.facts.instructions.values():
        frames = instruction.metadata.frames if instruction.metadata else ()
        named = ((PurePosixPath(frame.file).name, frame.line) for frame in frames)
        line = next((f"{name}:{number}" for name, number in named if name in files), None)
        found |= set() if line is None else {line}
    return frozenset(found)
