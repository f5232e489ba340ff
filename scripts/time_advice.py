"""Follows the advice of "where the time goes" on an attached GPU: time saved beside the report's estimate of it.

    python scripts/time_advice.py -o notebooks/results/advice-h100.json [--only "exact float32" ...]

Programs come from tests/decisions/advised.py, each at several sizes; indices and numbers are random. Prints a line a
program: times in microseconds of a call, measured and estimated, as it is and as advised.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The machine with the GPU need not have the package installed.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "decisions")]


def drawn(key: Any, wanted: Any) -> Any:
    """Random values: normal floats, and integers of all sizes, which the programs take modulo what they index."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(wanted.dtype, jnp.integer):
        return jax.random.randint(key, wanted.shape, 0, 2**30).astype(wanted.dtype)
    return jax.random.normal(key, wanted.shape, wanted.dtype)


def times(functions: dict[str, Callable[..., Any]], arguments: tuple[Any, ...]) -> dict[str, float]:
    """Microseconds of a call, taking turns: on the GPU, or by the wall clock where the GPU waits between launches."""
    import jax

    from xlafuse.bench.timing import Candidate, buffer_sets, time_candidates

    total = sum(each.size * each.dtype.itemsize for each in arguments)
    keys = jax.random.split(jax.random.key(0), buffer_sets(total) * len(arguments)).reshape(-1, len(arguments))
    inputs = [tuple(map(drawn, row, arguments)) for row in keys]
    compiled = {name: jax.jit(function).lower(*arguments).compile() for name, function in functions.items()}
    run = time_candidates([Candidate(name=name, kind="strategy", call=call, inputs=inputs)
                           for name, call in compiled.items()], rounds=5, warm_up_seconds=(0.1, 0.3))  # fmt: skip
    if run.failures:
        raise RuntimeError(str(run.failures))
    return {name: max(each.median_us, each.wall_us if len(each.kernels) > 100 else 0)
            for name, each in run.timings.items()}  # fmt: skip


def main() -> int:
    """Times the programs; 1 where advice made one slower."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="PROGRAM")
    options = parser.parse_args()
    import jax
    from advised import ADVISED  # pyright: ignore[reportMissingImports]

    from hlo_analysis import analyze, capture
    from xlafuse.catalogue import KERNELS

    lines = []
    for name in options.only or ADVISED:
        program = ADVISED[name]
        functions = {"as it is": program.needs, "as advised": program.followed}
        for arguments in program.sizes:
            before, after = (analyze(capture(function, *arguments, target="attached"), catalogue=KERNELS)
                             for function in functions.values())  # fmt: skip
            words = program.cause.partition(" of ")[0] if "scatter" not in program.cause else "A scatter adds"
            said = [each for each in before.hotspots if each.cause.startswith(words) and program.remedy in each.remedy]
            line = {
                "program": name,
                "sizes": " ".join(f"{each.dtype}{list(each.shape)}" for each in arguments),
                "said": bool(said),
                "estimated_us": [round(before.estimated_us, 1), round(after.estimated_us, 1)],
                "longest_us": max((each.most_us or 0 for each in said), default=0),
            }
            try:
                line["measured_us"] = [round(each, 1) for each in times(functions, arguments).values()]
            except Exception as error:  # the others are worth having
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            lines.append(line)
            print(json.dumps(line), flush=True)
    result = {"device": jax.devices()[0].device_kind, "lines": lines}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(any("error" in each or each["measured_us"][1] > each["measured_us"][0] for each in lines))


if __name__ == "__main__":
    raise SystemExit(main())
