"""Compares the estimates of matrix products, by which `implementation=None` chooses, with measured times.

    python scripts/check_product_costs.py [RESULTS.json ...]

RESULTS: files of `xlafuse bench choice` or `xlafuse bench kernels`; by default the committed ones of an H200. A line
for each forward call of at least 512 rows: measured and estimated µs of the kernel and of XLA. It ends with how often
the estimates choose the slower one, and what that costs.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = [ROOT / "notebooks" / "results" / f"{name}-h200.json" for name in ("choice-before", "choice", "kernels")]


def calls(files: list[Path]) -> Iterator[tuple[str, str, float, float]]:
    """Yields operation, spec and the times of the kernel and of XLA of forward calls that both ran."""
    for file in files:
        for run in json.loads(file.read_text())["runs"]:
            for shape in run["shapes"]:
                times = {c["name"]: c["timing"]["median_us"] for c in shape["candidates"]}
                ours = times.get("mosaic", next((t for n, t in times.items() if n.startswith("None: mosaic")), None))
                if shape["phase"] == "forward" and ours and "xla" in times:
                    yield shape["op"], shape["spec"], ours, times["xla"]


def sizes(spec: str) -> tuple[int, int, int] | None:
    """Reads rows, features and outputs from a drawn call's name."""
    x = re.search(r"x=([\dx]+)-", spec)
    w = re.search(r"w(?:_gate)?=(\d+)x(\d+)-", spec)
    if x is None or w is None:
        named = re.match(r"(\d+)-(\d+)-(\d+)-bfloat16", spec)  # a spec of the registry
        return (int(named[1]), int(named[2]), int(named[3])) if named else None
    *leading, features = map(int, x[1].split("x"))
    return math.prod(leading), features, int(w[2])


def estimates(op: str, spec: str) -> tuple[float, float] | None:
    """Returns the estimated times of the kernel and of XLA, or None for other operations and few rows."""
    from pallas_kernels.ops._products.product import estimate

    known = sizes(spec)
    if known is None or known[0] < 512:
        return None
    rows, features, outputs = known
    if op == "gated_linear":
        return estimate(rows, outputs, features, products=2)
    if op == "linear_residual_norm":
        return estimate(rows, outputs, features, read_bytes=2)
    if op != "linear":
        return None
    residual = re.search(r"residual=[\dx]+-[a-z]+(\d+)", spec)
    has_residual = "residual" in spec
    return estimate(
        rows,
        outputs,
        features,
        is_fused=not (has_residual or "activation" in spec or "gelu" in spec),
        read_bytes=int(residual[1]) // 8 if residual else 2 * has_residual,
        out_bytes=4 if "out_dtype=float32" in spec else 2,
    )


def main() -> int:
    """Prints the comparison."""
    lost, wrong, count = 0.0, 0, 0
    for op, spec, ours, xla in calls([Path(name) for name in sys.argv[1:]] or RESULTS):
        estimated = estimates(op, spec)
        if estimated is None:
            continue
        count += 1
        chosen = ours if estimated[0] < estimated[1] else xla
        wrong += chosen > 1.03 * min(ours, xla)
        lost += math.log(chosen / min(ours, xla))
        print(f"kernel {ours:8.1f} ({estimated[0]:8.1f})  XLA {xla:8.1f} ({estimated[1]:8.1f})  {op} {spec[:100]}")
    mean = math.exp(-lost / count) if count else math.nan
    print(f"{count} calls; in {wrong} the estimates choose what is more than 3 % slower; best / chosen is {mean:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
