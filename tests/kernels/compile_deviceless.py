"""Compiles kernels for an H200 that is not there, and reads what ptxas says of each.

python compile_deviceless.py OP [--variants]     the kernels of one operation, as JSON

Only the kernels are compiled, each with the arguments that it has in the traced call; what XLA makes of the operations
around them is left out: of lora_linear it took 15 of 26 seconds, and the kernels are the same.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import compiled_kernels
import jax
from jax._src.core import jaxprs_in_params
from jax._src.mesh import AbstractDevice
from jax._src.state import AbstractRef
from jax.experimental import topologies
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding

from hlo_analysis.capture.resources import parse_ptxas
from hlo_analysis.targets import load_target
from pallas_kernels import OpSpec, batch_norm, bias_activation, gated_activation, get_op, testing
from pallas_kernels.specs import ArgSpec, plain

KERNEL = "mpmd_map"
"""The primitive that `plgpu.kernel` binds."""
HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
SHUFFLED = re.compile(r"shfl\.sync\.bfly\.b32\s+(%\w+),")
SERIALIZED = re.compile(r"(wgmma\.mma_async instructions are serialized due to .+?) (?:in|for) the function '([^']+)'")
WAIT = re.compile(r"(warpgroup\.wait is injected) in around line \d+ by compiler (.+?) in function '([^']+)'")
ADDED_TO_A_PRODUCT = re.compile(r"fma\.rn\.f32\s+%\w+, \S+, \S+, (%\w+);")

_known: dict[str, dict[str, Any]] = {}
"""What ptxas said, by `compiled_kernels.digest_of`: most operations call some kernel in several of their cases."""

_by_hash: dict[str, dict[str, Any]] = {}
"""The same by Mosaic GPU's hash of a kernel. XLA compiles each hash once a process; with jax 0.12 different jaxprs of
one kernel share it."""

Case = tuple[str, str, Callable[..., Any], tuple[Any, ...]]
"""A phase, the name of a variant or "default", the function to compile and its arguments as ShapeDtypeStructs."""


def prepare() -> None:
    """For a process that only compiles: no GPU, and Mosaic GPU prints PTX and what ptxas says."""
    os.environ.update({"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"})
    jax.config.update("jax_platforms", "cpu")
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # else a tenth of the time goes into looking through jaxprs, which are kept


def waits(ptxas: str) -> tuple[str, ...]:
    """Returns ptxas' messages about matrix products that it forces to wait, each with the kernel's name.

    If the registers of an asynchronous wgmma are used too early or do not suffice, ptxas still makes a correct kernel.
    Each wgmma then ends before the next one starts (notes C7510 to C7516), or ptxas adds a wait (C7517). No register
    need spill and nothing fails; the kernel is only slower. An added `warpgroup.arrive` (C7519) is common and is no
    wait.
    """
    found = [f"{kernel}: {' '.join(why.split())}" for why, kernel in SERIALIZED.findall(ptxas)]
    found += [f"{kernel}: {what} {why}" for what, why, kernel in WAIT.findall(ptxas)]
    return tuple(found)


@contextlib.contextmanager
def printed() -> Iterator[Callable[[], str]]:
    """Captures the process's standard output, C++ included; yields a function that returns the text afterwards."""
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        said: list[str] = []
        try:
            yield lambda: "".join(said)
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            said.append(file.read())


def compile_operation(name: str, part: int = 0, parts: int = 1, *, with_variants: bool = False) -> list[dict[str, Any]]:
    """Every kernel of an operation's GPU specs, as `compile_kernels` has it, with `spec`, `phase` and `variant`.

    part: so many parts of the specs there are, and this one is meant.
    """
    op = get_op(name)
    return [
        {"spec": spec.name, "phase": phase, "variant": variant, **kernel}
        for spec in op.tagged("gpu")[part::parts]
        for phase, variant, function, arguments in cases(op, spec, with_variants=with_variants)
        for kernel in compile_kernels(function, *arguments)
    ]


def recorded_operation(name: str, part: int, parts: int) -> list[dict[str, Any]]:
    """`compile_operation`, which compiles only kernels that are not in their record, and brings that up to date."""
    record = f"{name}-{part}" if parts > 1 else name
    _known.update(compiled_kernels.read(record))
    kernels = compile_operation(name, part, parts)
    compiled_kernels.write(record, {each["digest"]: _known[each["digest"]] for each in kernels})
    return kernels


def cases(op: OpSpec, spec: ArgSpec, *, with_variants: bool) -> Iterator[Case]:
    """Both phases as dispatch has them, and each variant alone."""
    structs = spec.structs()
    outputs = tuple(jax.tree.leaves(jax.eval_shape(lambda arguments: op.reference(**plain(arguments)), structs)))

    def forward(arguments):
        return testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), "mosaic")

    def backward(arguments, cotangents):
        return op.backward("mosaic", plain(arguments), cotangents)

    yield "forward", "default", forward, (structs,)
    yield "backward", "default", backward, (structs, outputs)
    if with_variants and "bench" in spec.tags:
        for phase, arguments in (("forward", structs), ("backward", {**structs, "cotangents": outputs})):
            for variant, function in op.variants(phase, plain(structs)).items():
                yield phase, variant, lambda arguments, f=function: f(**plain(arguments)), (arguments,)


def compile_kernels(function: Callable[..., Any], *structs: Any) -> list[dict[str, Any]]:
    """What ptxas says of each kernel in a call of `function`; kernels of earlier calls are not compiled again.

    `kernel`, `registers`, `spill_store_bytes` and others of `parse_ptxas`; `wgmmas`: how many such instructions there
    are; `waits`: what `waits` finds; `code`: a digest of the PTX, by which two commits' kernels of the same
    call compare; `fused_sums`: sums over lanes in which a lane's own product is not rounded, so that lanes disagree on
    the result (see `pallas_kernels.primitives.rows.sum_of`).

    Raises:
        RuntimeError: ptxas did not say one thing of each kernel.
    """
    mesh, sharding = h200()
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*structs).jaxpr.jaxpr
        used, _ = dce_jaxpr(traced, [True] * len(traced.outvars))
        calls = {compiled_kernels.digest_of(call): call for call in kernel_calls(used)}
        _known.update({digest: compiled(call, sharding) for digest, call in calls.items() if digest not in _known})
    return [{"digest": digest, **_known[digest]} for digest in calls]


def compiled(call: Any, sharding: SingleDeviceSharding) -> dict[str, Any]:
    """What `compile_kernels` says of one kernel. It is compiled alone: XLA has its own order of a program's kernels."""
    lowered = lowered_alone(call, sharding)
    (known,) = HASH.findall(lowered.as_text())
    if known not in _by_hash:
        with printed() as text:
            lowered.compile()
        # Before the kernel's PTX stands who made it, after it what ptxas says of it.
        _, part = text().split("Generated by LLVM NVPTX Back-End")
        _by_hash[known] = described(part)
    return _by_hash[known]


def lowered_alone(call: Any, sharding: SingleDeviceSharding) -> Any:
    operands = [struct_of(v.aval, sharding) for v in call.invars]
    program = jax.jit(lambda operands: bound(call, operands), out_shardings=sharding)
    return program.trace(operands).lower(lowering_platforms=("cuda",))


def elementwise_accesses(rows: int, columns: int) -> list[dict[str, int]]:
    """The accesses to global memory, by instruction, in three kernels that take several bf16 rows at once."""
    x, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, columns), (columns,)))
    packed = jax.ShapeDtypeStruct((rows, 2 * columns), "bfloat16")
    functions = [
        (lambda x, bias: bias_activation(x, bias, activation="gelu", implementation="mosaic"), (x, bias)),
        (lambda packed: gated_activation(packed, implementation="mosaic"), (packed,)),
        (lambda x, bias: batch_norm(x, bias, bias, implementation="mosaic")[0], (x, bias)),
    ]
    mesh, sharding = h200()
    found = []
    for function, structs in functions:
        with jax.sharding.use_abstract_mesh(mesh):
            *_, last = kernel_calls(jax.jit(function).trace(*structs).jaxpr.jaxpr)
        with printed() as text:
            lowered_alone(last, sharding).compile()
        found.append(dict(Counter(re.findall(r"\t((?:ld|st)\.global\S*)", text()))))
    return found


def kernel_calls(jaxpr: Any) -> Iterator[Any]:
    """The equations that call kernels, also in functions within."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == KERNEL:
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from kernel_calls(inner)


def struct_of(aval: Any, sharding: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    """An operand's array, or what its reference refers to."""
    inner = aval.inner_aval if isinstance(aval, AbstractRef) else aval
    return jax.ShapeDtypeStruct(inner.shape, inner.dtype, sharding=sharding)


def bound(call: Any, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The call alone: what it returns, and what it leaves in the references that it takes."""
    given = [
        jax.new_ref(operand) if isinstance(v.aval, AbstractRef) else operand
        for v, operand in zip(call.invars, operands, strict=True)
    ]
    returned = call.primitive.bind(*given, **call.params)
    return [*returned, *(each[...] for each in given if isinstance(jax.typeof(each), AbstractRef))]


@functools.cache
def h200() -> tuple[AbstractMesh, SingleDeviceSharding]:
    """The mesh to trace and lower under, and where arguments lie."""
    target = load_target("h200").config_text
    device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target).devices[0]
    described = AbstractDevice(device_kind=device.device_kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("_device",), axis_types=(AxisType.Auto,), abstract_device=described)
    return mesh, SingleDeviceSharding(device)


def described(part: str) -> dict[str, Any]:
    """One kernel, from its PTX and ptxas' words."""
    said = parse_ptxas(part)
    if len(said) != 1 or not {"registers", "spill_store_bytes", "spill_load_bytes"} <= said[0].keys():
        raise RuntimeError(f"ptxas said something else: {part[-2000:]}")
    return {
        **said[0],
        "wgmmas": part.count("wgmma.mma_async.sync"),
        "waits": waits(part),
        "code": digest(part),
        "fused_sums": len({*SHUFFLED.findall(part)} & {*ADDED_TO_A_PRODUCT.findall(part)}),
    }


def digest(part: str) -> str:
    """Of a kernel's PTX without what tells its place in the source."""
    lines = part.partition("\t.section")[0].splitlines()
    kept = [line for line in lines if not re.match(r"\s*(\.loc|\.file|//|\$L__tmp|\$L__func)", line)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


if __name__ == "__main__":
    prepare()
    print(json.dumps(compile_operation(sys.argv[1], with_variants="--variants" in sys.argv)))
