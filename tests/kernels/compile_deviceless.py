"""Compiles the kernels of one operation for an H200 that is not there; prints registers and spills as JSON.

MOSAIC_GPU_DUMP_PTXAS=1 JAX_PLATFORMS=cpu python compile_deviceless.py OP DIR [--variants]
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path

import jax
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding

from hlo_analysis.targets import load_target
from pallas_kernels import get_op, testing
from pallas_kernels.specs import plain

SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def main(name: str, dump: Path, *, with_variants: bool) -> None:
    op = get_op(name)
    device = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=load_target("h200").config_text
    ).devices[0]
    sharding = SingleDeviceSharding(device)
    mesh = AbstractMesh(
        (1,),
        ("_device",),
        axis_types=(AxisType.Auto,),
        abstract_device=AbstractDevice(device_kind=device.device_kind, num_cores=132, platform="gpu"),
    )

    def compile_kernels(function, *structs):
        placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), structs)
        with jax.sharding.use_abstract_mesh(mesh), printed(dump / "ptxas.txt") as text:
            jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
            jitted.trace(*placed).lower(lowering_platforms=("cuda",)).compile()
        return [resources(part) for part in text().split("Compiling entry function")[1:]]

    results = []
    for spec in op.tagged("gpu"):
        structs = spec.structs()
        outputs = tuple(
            jax.tree.leaves(jax.eval_shape(lambda arguments, op=op: op.reference(**plain(arguments)), structs))
        )

        def forward(arguments, op=op):
            return testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), "mosaic")

        def backward(arguments, cotangents, op=op):
            return op.backward("mosaic", plain(arguments), cotangents)

        cases = [("forward", "default", forward, (structs,)), ("backward", "default", backward, (structs, outputs))]
        if with_variants and "bench" in spec.tags:
            for phase, arguments in (("forward", structs), ("backward", {**structs, "cotangents": outputs})):
                for variant, function in op.variants(phase, plain(structs)).items():
                    cases.append((phase, variant, lambda arguments, f=function: f(**plain(arguments)), (arguments,)))
        for phase, variant, function, arguments in cases:
            for kernel in compile_kernels(function, *arguments):
                results.append({"spec": spec.name, "phase": phase, "variant": variant, **kernel})
    print(json.dumps(results))


@contextlib.contextmanager
def printed(path: Path):
    """What the process itself, C++ included, writes to its standard output goes to a file; gives a reader of it."""
    sys.stdout.flush()
    before = os.dup(1)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield path.read_text
    finally:
        os.dup2(before, 1)
        os.close(before)


def resources(ptxas: str) -> dict[str, int]:
    """Registers a thread and spilled bytes of the one kernel in ptxas's words."""
    spills, registers = SPILLS.search(ptxas), REGISTERS.search(ptxas)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas said something else: {ptxas[:2000]}")
    return {
        "registers": int(registers[1]),
        "spill_stores": int(spills[2]),
        "spill_loads": int(spills[3]),
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), with_variants="--variants" in sys.argv)
