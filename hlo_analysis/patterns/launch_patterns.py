"""What one launch does, as far as its opcodes and its HLO text tell: the signs by which a remedy is chosen."""

from __future__ import annotations

import re
from math import prod

from hlo_analysis.records import Launch

PRODUCTS = frozenset(("triton_gemm", "cublas", "cublaslt"))
"""Kinds of launch that are matrix products."""

LIBRARIES = frozenset(("cublas", "cublaslt"))
"""Products that take no work of others."""

_LAYOUT_MOVES = frozenset(("transpose", "copy", "reshape"))
_MOVES = _LAYOUT_MOVES | {"concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad"}
LINEAR = frozenset(_MOVES | {"add", "convert", "bitcast", "broadcast", "reduce", "dot", "custom-call", "tuple"})
"""What may be done to parts of a sum as well as to the sum."""

# Beside moves: what is done to indices that are taken or kept within bounds.
_OF_INDICES = {"gather", "broadcast", "iota", "convert", "compare", "select", "add", "subtract", "and", "or", "clamp",
               "negate", "minimum", "maximum"}  # fmt: skip
_SCALES = {"convert", "multiply", "subtract", "broadcast", "reshape", "transpose"}
_CALLBACK = re.compile(r'custom_call_target="xla_ffi_(partitioned_)?python_')
_SIXTEEN_BITS = ("bf16", "f16")
_NAME = r"%([\w.\-]+)"
# Every other element along an axis, and its way back: a padding of one between any two.
_EVERY_OTHER = re.compile(r"slice=\{[^}]*:\d+:2\]|padding=[\dx_\-]*?\d_\d+_1(?!\d)")


def has(launch: Launch, opcode: str) -> bool:
    """Whether there is such an instruction inside."""
    return any(found == opcode for found, _ in launch.opcodes)


def is_product(launch: Launch) -> bool:
    """Whether a launch is a matrix product, whoever makes it; cuBLAS solves triangular systems, too."""
    return (launch.kind in PRODUCTS or has(launch, "dot")) and "triangularSolve" not in launch.hlo


def convolves(launch: Launch) -> bool:
    """Whether it is one of cuDNN's convolutions."""
    return launch.kind == "cudnn" and "__cudnn$conv" in launch.hlo


def calls_python(launch: Launch) -> bool:
    """Whether it calls back to Python on the host, as `jax.debug.print` and `pure_callback` do."""
    return launch.kind == "custom_call" and bool(_CALLBACK.search(launch.hlo))


def is_closed(launch: Launch) -> bool:
    """Whether it is a library's kernel (cuDNN, cuSOLVER, cuBLAS, cuFFT), which takes no work of others."""
    return launch.kind in ("cudnn", "custom_call", *LIBRARIES) or has(launch, "fft")


def only_moves(launch: Launch) -> bool:
    """Whether it changes no value. An exact copy is none: it is there to keep a buffer whole."""
    opcodes = {opcode for opcode, _ in launch.opcodes} - {"convert", "broadcast"}
    return bool(opcodes) and opcodes <= _MOVES and not fills(launch) and (launch.kind, opcodes) != ("copy", {"copy"})


def spreads(launch: Launch) -> bool:
    """Whether it writes each of its values to several places."""
    return has(launch, "broadcast") and launch.bytes_written >= 2 * launch.bytes_read


def repeats_rows(launch: Launch) -> bool:
    """Whether it takes rows by indices, each several times, and does nothing to most of them but to join them."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    plain = opcodes <= _MOVES | _OF_INDICES or _joins_rows(launch.hlo)
    return "gather" in opcodes and plain and launch.bytes_written >= 2 * launch.bytes_read


def _joins_rows(hlo: str) -> bool:
    """Whether at least half of what is joined in the end are rows as they were taken."""
    made = {name: found for name, *found in re.findall(rf"{_NAME} = \w+\[([\d,]*)\]\S* ([\w\-]+)\((.*?)\)", hlo)}
    joined = re.search(r"ROOT .* concatenate\((.*?)\)", hlo)
    rows = whole = 0
    for name in re.findall(_NAME, joined[1]) if joined else ():
        sizes, opcode, operands = made.get(name, ("", "", ""))
        size = prod(map(int, sizes.split(","))) if sizes else 0
        while opcode in ("bitcast", "reshape", "convert"):
            _, opcode, operands = made.get(operands.strip("%"), ("", "", ""))
        whole += size
        rows += size if opcode == "gather" else 0
    return 0 < whole <= 2 * rows


def dequantizes(launch: Launch) -> bool:
    """Whether it makes wide weights of integers, and does nothing to them but to scale and shift."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    integers = [value.bytes for value in launch.inputs if re.match(r"[su][48]\[\d+,", value.shape)]
    widens = bool(integers) and 2 * max(integers) <= launch.bytes_written
    return widens and {"convert", "multiply"} <= opcodes <= _SCALES and launch.phase == "forward"


def is_batched(product: Launch) -> bool:
    """Whether a product is of several pairs of matrices."""
    return bool(re.search(r'lhs_batch_dims=\{\d|"lhs_batch_dimensions":\["?\d', product.hlo))


def takes_sixteen_bits(product: Launch) -> bool:
    """Whether both factors of a product are bfloat16 or float16."""
    if dot := re.search(rf" dot\({_NAME}, {_NAME}\)", product.hlo):
        types = [re.search(rf"%{re.escape(name)} = (\w+)\[", product.hlo) for name in dot.groups()]
        return all(found is not None and found[1] in _SIXTEEN_BITS for found in types)
    return all(value.shape.partition("[")[0] in _SIXTEEN_BITS for value in product.inputs[:2])


def relays(launch: Launch) -> bool:
    """Whether a launch that only moves changes the order of elements, or nothing at all."""
    return any(opcode in _LAYOUT_MOVES for opcode, _ in launch.opcodes)


def only_casts(launch: Launch) -> bool:
    """Whether it converts to another type and does nothing else."""
    return {opcode for opcode, _ in launch.opcodes} == {"convert"}


def fills(launch: Launch) -> bool:
    """Whether it writes one value everywhere."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    return "broadcast" in opcodes and opcodes <= {"broadcast", "copy"} and launch.bytes_read < 64


def sums_columns(launch: Launch) -> bool:
    """Whether no sum of a launch is over the axis that is the last in memory: so are those of a batch normalization."""
    found = re.findall(rf" reduce\({_NAME}[^)]*\), dimensions=\{{([\d,]*)\}}", launch.hlo)
    last = [re.search(rf"%{re.escape(name)} = \w+\[[\d,]*\]\{{(\d+)", launch.hlo) for name, _ in found]
    return bool(found) and all(at and at[1] not in axes.split(",") for at, (_, axes) in zip(last, found, strict=True))


def normalizes(launch: Launch) -> bool:
    """Whether the launch is a normalisation of rows, or a part of one: by its operations, else by the model's name."""
    return has(launch, "rsqrt") or "norm" in launch.scope.rsplit("/", 1)[-1]


def shifts(launch: Launch) -> bool:
    """Whether it takes the exponential of what is left of a row's largest value, as a softmax does.

    Other exponentials are those of sigmoids, or of a difference of two arrays (the gradient of a softplus).
    """
    if not has(launch, "exponential"):
        return False
    names = re.findall(rf" exponential\({_NAME}\)", launch.hlo)
    return not names or any(_subtracts_rows(launch.hlo, name) for name in names)


def _subtracts_rows(hlo: str, name: str) -> bool:
    if cast := re.search(rf"%{re.escape(name)} = \S+ convert\({_NAME}\)", hlo):
        name = cast[1]
    found = re.search(rf"%{re.escape(name)} = \S+ subtract\({_NAME}, {_NAME}\)", hlo)
    return bool(found) and bool(re.search(rf"%{re.escape(found[2])} = \S+ broadcast\(", hlo))


def is_softmax(launch: Launch) -> bool:
    """Whether XLA made one kernel of a softmax already."""
    return launch.kind == "triton" and has(launch, "exponential") and has(launch, "reduce")


def takes_every_other(launch: Launch) -> bool:
    """Whether it takes apart, or puts together, elements of even and odd index: a level of `lax.associative_scan`."""
    return bool(_EVERY_OTHER.search(launch.hlo))
