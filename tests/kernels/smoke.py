"""Compiles a kernel or two of each family for an H200: `make smoke-jax0.11` runs it with that version of jax."""

from __future__ import annotations

import sys
import warnings

import compile_deviceless

from pallas_kernels import REGISTRY

FAMILIES = (
    *("rms_norm", "softmax", "cross_entropy", "rope", "bias_activation", "batch_norm"),
    *("linear", "quantized_linear", "linear_cross_entropy", "attention", "decode_attention"),
    *("embedding", "dot_interaction"),
)


def main() -> None:
    """Ends with an exception when a kernel does not compile or spills, or jax warns."""
    warnings.simplefilter("error")
    compile_deviceless.prepare()
    for name in sys.argv[1:] or FAMILIES:
        op = REGISTRY[name]
        for phase, _, function, arguments in compile_deviceless.cases(op, op.tagged("gpu")[0], with_variants=False):
            kernels = compile_deviceless.compile_kernels(function, *arguments)
            spilling = [kernel["kernel"] for kernel in kernels if kernel["spill_store_bytes"]]
            if spilling:
                raise SystemExit(f"{name}, {phase}: kernels spill registers: {spilling}")
            print(f"{name}, {phase}: {len(kernels)} kernels", flush=True)


if __name__ == "__main__":
    main()
