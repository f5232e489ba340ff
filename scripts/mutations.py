"""Plants faults, one at a time, in a copy of the packages, and shows that a test catches each.

    python scripts/mutations.py [NAME ...]

Exits with 1 where a fault goes unseen, or where the code to change is no longer there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("hlo_analysis", "pallas_kernels", "xlafuse", "tests", "pyproject.toml")

Mutation = tuple[str, str, str, str]
"""File, code in it, what takes its place, and the tests that are to fail."""

MUTATIONS: dict[str, Mutation] = {
    "norm without epsilon": (
        "pallas_kernels/ops/_norms/forward.py",
        "lax.rsqrt(mean_squares + norm.epsilon)",
        "lax.rsqrt(mean_squares)",
        "tests/kernels/test_operations.py -k test_values_and_gradients[rms_norm-mosaic-4x512",
    ),
    "rope's gradient turns forward": (
        "pallas_kernels/ops/rope/heads_kernel.py",
        "return cosines, (-sines[1], -sines[0]) if self.plan.is_backward else sines",
        "return cosines, sines",
        "tests/kernels/test_operations.py -k test_values_and_gradients[rope-mosaic",
    ),
    "a causal query does not see its own key": (
        "pallas_kernels/ops/attention/masking.py",
        "column <= (row + self.right if self.right else row)",
        "column < (row + self.right if self.right else row)",
        "tests/kernels/test_operations.py -k test_values_and_gradients[attention-mosaic",
    ),
    "products leave their bias out": (
        "pallas_kernels/primitives/gemm/epilogue.py",
        "product + bias for product, bias in zip(",
        "product for product, bias in zip(",
        "tests/kernels/test_gemm.py -k test_epilogue_order",
    ),
    "label smoothing counts no logits": (
        "pallas_kernels/ops/cross_entropy/mosaic_gpu.py",
        "smooth_sum = logit_sum if terms.label_smoothing else None",
        "smooth_sum = None",
        "tests/kernels/test_operations.py -k test_values_and_gradients[cross_entropy-mosaic",
    ),
    "a product has one operation an element": (
        "hlo_analysis/costs/flops.py",
        "2 * result.element_count * depth",
        "result.element_count * depth",
        "tests/analysis/test_analysis_units.py tests/analysis/test_analysis_traffic.py",
    ),
    "memory and arithmetic in turn": (
        "hlo_analysis/costs/roofline.py",
        "max(self.memory_us, self.compute_us, self.link_us) +",
        "self.memory_us + self.compute_us + self.link_us +",
        "tests/analysis/test_analysis_units.py",
    ),
    "bits round down to bytes": (
        "hlo_analysis/hlo/shape.py",
        "bits + 7) // 8",
        "bits) // 8",
        "tests/hlo/test_hlo_shape.py",
    ),
    "arithmetic waits for memory": (
        "hlo_analysis/missed/cost.py",
        'launch.limiter in ("compute", "link") or ',
        'launch.limiter == "link" or ',
        "tests/decisions/test_missed.py",
    ),
    "a fusion reads what it slices whole": (
        "hlo_analysis/costs/traffic.py",
        "-(-shape.byte_size * needed[parameter.name] // max(shape.element_count, 1))",
        "shape.byte_size",
        "tests/analysis/test_analysis_traffic.py",
    ),
}


def survives(folder: Path, mutation: Mutation) -> bool:
    """Whether the tests pass with the fault.

    Raises:
        LookupError: the file does not hold the code once.
    """
    name, old, new, tests = mutation
    path = folder / name
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise LookupError(f"{name} holds {old!r} {text.count(old)} times")
    path.write_text(text.replace(old, new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests.split(" ")]
    environment = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise LookupError(f"no test ran: {done.stdout[-400:]}")
    return done.returncode == 0


def main() -> int:
    """Each mutation with its outcome, a line each."""
    chosen = sys.argv[1:] or list(MUTATIONS)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(scratch) / name)
        for name in chosen:
            try:
                outcome = "NOT CAUGHT" if survives(Path(scratch), MUTATIONS[name]) else "caught"
            except LookupError as error:
                outcome = f"NOT TRIED: {error}"
            failed |= outcome != "caught"
            print(f"{name}: {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
