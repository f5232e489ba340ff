"""Records how the attached GPU autotunes the block under every strategy, to be replayed where there is no GPU.

    python scripts/record_autotune.py RECORDING.txtpb LAUNCHES.json [--only llama3-8b/xla/ ...]

Compiles each case on the attached GPU and writes two files, again after every case, so that a run cut short keeps what
it has. RECORDING is XLA's autotuning of all cases in one text proto, for `hlo_analysis/targets/autotune/`. LAUNCHES
says which kinds of kernels the GPU was given in each case, for the test that a replay gives the same ones.

Cases share one autotuning: each starts from what the ones before it chose, so that a product which several of them hold
is tuned once and the recording never contradicts LAUNCHES. What is to be recorded first comes first. With --only, the
two files that are there are added to: rows of LAUNCHES are replaced case by case, and products known to RECORDING keep
their choice. Without it both are begun anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the machine with the GPU need not have the package installed

LLAMA, GPT2 = "llama3-8b", "gpt2-medium"
LLAMA_SHAPES = ((2, 4096), (1, 512), (1, 1))
GPT2_SHAPES = ((1, 512), (2, 1024))
MODES = ("forward", "grad")
OTHERS = ("best", "pallas_cudnn", "pallas", "xla_cudnn", "xla_cublas", "xla_dot_merger", "xla_gemm_v2", "unfused")
Case = tuple[str, str, str, tuple[int, int]]
"""One program to record: preset, strategy, mode and shape."""


def cases() -> list[Case]:
    """Lists the programs to record, the most wanted first."""
    wanted = [
        *((LLAMA, "xla", mode, shape) for mode in MODES for shape in LLAMA_SHAPES),
        *((LLAMA, name, "forward", shape) for name in OTHERS for shape in LLAMA_SHAPES),
        *((LLAMA, name, "grad", LLAMA_SHAPES[0]) for name in OTHERS),
        *((GPT2, "xla", mode, shape) for mode in MODES for shape in GPT2_SHAPES),
        *((GPT2, "pallas", mode, GPT2_SHAPES[-1]) for mode in MODES),
        *((LLAMA, name, "grad", shape) for name in OTHERS for shape in LLAMA_SHAPES[1:]),
    ]
    # cuDNN has no gradient of attention for one token.
    return [case for case in wanted if case[2:] != ("grad", (1, 1)) or not case[1].endswith("cudnn")]


def record(case: Case, recording: Path) -> dict[str, Any]:
    """Compiles one case on the GPU, adds its choices to `recording` and returns its row of LAUNCHES."""
    from hlo_analysis import analyze
    from hlo_analysis.capture import capture, merge_autotune
    from xlafuse.files import write_files
    from xlafuse.models import block_function
    from xlafuse.strategies import get_strategy

    preset, name, mode, shape = case
    strategy = get_strategy(name)
    function, arguments = block_function(preset, shape, plan=strategy.plan)
    known = recording if recording.exists() else None
    captured = capture(
        strategy.rewritten(function),
        *arguments,
        target="attached",
        mode="grad" if mode == "grad" else "forward",
        compiler_options=strategy.compiler_options,
        autotune=known,
    )
    if chosen := captured.text("autotune_results"):
        before = [known.read_text()] if known else []
        write_files(recording.parent, {recording.name: merge_autotune([*before, chosen])})
    analysis, provenance = analyze(captured), captured.manifest.provenance
    return {
        "preset": preset,
        "strategy": name,
        "mode": mode,
        "shape": list(shape),
        "kinds": dict(sorted(analysis.launches_by_kind.items())),
        "launches": analysis.launch_count,
        "gemm_choice": provenance.gemm_choice,
        "reused": provenance.autotune_hits,
        "lookups": provenance.autotune_lookups,
        "versions": dict(provenance.versions),
    }


def known_rows(launches: Path) -> dict[Case, dict[str, Any]]:
    """The rows of LAUNCHES by case, none where there is no such file."""
    found = json.loads(launches.read_text())["cases"] if launches.exists() else []
    return {(row["preset"], row["strategy"], row["mode"], tuple(row["shape"])): row for row in found}


def main() -> int:
    """Records the cases; 1 when one failed."""
    parser = argparse.ArgumentParser(description="Record the attached GPU's autotuning of the block.")
    parser.add_argument("recording", type=Path)
    parser.add_argument("launches", type=Path)
    parser.add_argument(
        "--only", nargs="+", metavar="PREFIX", help="of 'preset/strategy/mode/shape'; adds to the files"
    )
    options = parser.parse_args()
    for path in (options.recording, options.launches):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not options.only:
            path.unlink(missing_ok=True)

    # Tracing needs no GPU, and would take the memory that the compiling processes tune in.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from xlafuse.bench.environment import gpu_state

    state, rows = gpu_state(), known_rows(options.launches)
    document: dict[str, Any] = {"device": {"name": state.get("gpu"), "driver": state.get("driver")}}
    document |= {"cases": [], "failed": []}
    for case in cases():
        label = f"{case[0]}/{case[1]}/{case[2]}/{'x'.join(map(str, case[3]))}"
        if options.only and not label.startswith(tuple(options.only)):
            continue
        try:
            rows[case] = record(case, options.recording)
            print(f"{label:40} {rows[case]['reused']} of {rows[case]['lookups']} reused {rows[case]['kinds']}")
        except Exception as error:  # the other cases are worth having
            document["failed"].append({"case": label, "error": f"{type(error).__name__}: {error}"[:2000]})
            print(f"{label:40} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        document["cases"] = [rows[case] for case in cases() if case in rows]
        options.launches.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(document["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
