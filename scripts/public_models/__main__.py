"""Fuses unmodified public models and writes what `xlafuse.fuse` takes and refuses in them, for docs/public-models.md.

    python scripts/public_models [MODEL ...] --checkouts FOLDER
    python scripts/public_models [MODEL ...] --checkouts FOLDER --estimates 6  # what the report says of XLA's, without
    python scripts/public_models --write-page

Needs the extra 'deviceless', no GPU, and the packages of `xlafuse/bench/public/sources.py`; a model whose package
cannot be imported is left out. FOLDER holds checkouts of the repositories named there. For each model it compiles the
forward pass, the gradient and a training step for the H200, with and without `fuse`, and compares loss and gradients on
the CPU at a small size. Results go to notebooks/results/public_models.json. The page's times are those of
`xlafuse bench public`, in notebooks/results/public-h200.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_analysis import Analysis, analyze, capture
from hlo_analysis.capture.answers import answer_cudnn_checks
from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes
from hlo_analysis.targets import load_target
from xlafuse.bench.block_tables import model_table
from xlafuse.bench.public.programs import Program, PublicModel, part_of, shapes_of
from xlafuse.bench.public.sources import MODELS
from xlafuse.bench.results import Results, ShapeResult, load, markdown_table
from xlafuse.bench.settings import TORCH_MODES
from xlafuse.bench.tables import place
from xlafuse.catalogue import KERNELS
from xlafuse.fusion import Report, fuse
from xlafuse.fusion.evaluate import evaluate
from xlafuse.fusion.plan import make_plan
from xlafuse.numerics import judge
from xlafuse.regressions import costs_more

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "notebooks/results/public_models.json", ROOT / "docs/public-models.md"
MEASURED = RESULTS.with_name("public-h200.json")
TARGET = "h200"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the models and writes the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(model.name for model in MODELS))
    parser.add_argument("--checkouts", type=Path, default=Path(), help="folder of the repositories")
    parser.add_argument("--estimates", type=int, metavar="LAYERS", help="estimate XLA's times of real sizes, on no GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file to complete; default: %(default)s")
    parser.add_argument("--write-page", action="store_true", help="only write the page")
    options = parser.parse_args(argv)
    results = json.loads(options.results.read_text(encoding="utf-8")) if options.results.is_file() else {}
    failed = 0
    for model in () if options.write_page else MODELS:
        if options.models and model.name not in options.models:
            continue
        for part in TIMED if options.estimates else PARTS:
            try:
                if options.estimates:
                    found = {part: {"estimated": estimated(model, part, options.checkouts, options.estimates)}}
                else:
                    found = run(model, part, options.checkouts)
            except ModuleNotFoundError as error:
                print(f"{model.name}: left out, {error}", flush=True)
                break
            except Exception:
                failed += 1
                traceback.print_exc()
                continue
            print(f"{model.name} {part}: {found}", flush=True)
            known = results.setdefault(model.name, {})
            news = found.pop(part)
            known[part] = {**(known.get(part) or {}), **(news or {})}
            results[model.name] |= found
            results = {each.name: results[each.name] for each in MODELS if each.name in results}
            options.results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if options.results == RESULTS:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results, load(MEASURED)), encoding="utf-8")
    if options.write_page:
        return 0
    worse = [f"{name} {part}" for name, found in results.items() for part in PARTS[1:] if is_worse(found.get(part, {}))]
    if worse:
        print(f"fuse makes these worse in bytes or estimated time: {', '.join(worse)}")
    return int(failed > 0 or bool(worse))


def is_worse(found: dict[str, Any]) -> bool:
    """Returns whether `fuse` makes one part of a model worse, by what was compiled."""
    if not found.get("after"):
        return False
    after, before = ((found[which]["bytes"], found[which]["us"]) for which in ("after", "before"))
    return costs_more(after, before)


def run(model: PublicModel, part: str, checkouts: Path) -> dict[str, Any]:
    """Returns the results of one part of one model, and what the model is."""
    if part == "numerics":
        return {"source": model.source, "numerics": checked(model, checkouts)}
    program = model.build(checkouts, jnp.bfloat16, "page")
    fn, outer = part_of(program, part)
    found = sites_of(fn, shapes_of(program, "forward"))
    found |= compared(fn, outer, shapes_of(program, part), changes=bool(found["taken"]))
    return {"source": model.source, "size": program.size, part: found}


def estimated(model: PublicModel, part: str, checkouts: Path, layers: int) -> dict[str, Any]:
    """Estimates a part of a model as it is, at the real size with at most so many layers, compiled without a GPU.

    "most_us": where scatters certainly add many rows into few, and the data makes it one.
    """
    program = model.build(checkouts, jnp.bfloat16, "real", layers)
    fn, outer = part_of(program, part)
    analysis = analyze(capture(outer(fn), *shapes_of(program, part), target=TARGET))
    found = {"size": program.size, "us": round(analysis.estimated_us, 1)}
    scatters = [each for each in analysis.hotspots if each.most_us is not None]
    usual = sum(analysis.launches[place].run_us for each in scatters for place in each.launches)
    most = analysis.estimated_us - usual + sum(each.most_us or 0.0 for each in scatters)
    return found | ({"most_us": round(most, 1)} if scatters else {})


PARTS = ("numerics", "forward", "gradient", "step")
TIMED = {"forward": "forward", "step": "train"}
"""Parts that `xlafuse bench public` times, with its names for them."""


def sites_of(fn: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Counts the sites of a function on the target, by tracing it."""
    reports: list[Report] = []
    target = load_target(TARGET)
    with (
        answer_cudnn_checks(target),
        name_target_in_meshes(target),
        jax.sharding.use_abstract_mesh(mesh_of_one(target)),
    ):
        jax.eval_shape(fuse(fn, report=reports.append), *arguments)
    named = {
        "taken": [site.operation for site in reports[0].taken],
        "left": [site.operation for site in reports[0].left],
        "refused": [f"{site.operation}: {site.reason}" for site in reports[0].refused],
    }
    return {outcome: dict(collections.Counter(names).most_common()) for outcome, names in named.items()}


def compared(fn: Any, outer: Any, arguments: tuple[Any, ...], *, changes: bool) -> dict[str, Any]:
    """Compiles `outer(fn)` and, if `fuse` changes it, `outer(fuse(fn))` for the target."""
    plain = analyze(capture(outer(fn), *arguments, target=TARGET), catalogue=KERNELS)
    after = None
    if changes:
        after = totals(analyze(capture(outer(fuse(fn)), *arguments, target=TARGET), catalogue=KERNELS))
    return {"before": totals(plain), "after": after}


def totals(analysis: Analysis) -> dict[str, Any]:
    """Returns launches, HBM traffic and estimated time."""
    return {
        "launches": analysis.launch_count,
        "bytes": analysis.traffic.bytes,
        "us": round(analysis.estimated_us, 1),
    }


def checked(model: PublicModel, checkouts: Path) -> dict[str, Any] | None:
    """Compares loss and gradients with a more exact run on the CPU, by the 2 x rule; None where there is no such run.

    Operations run by their XLA references. The exact run is in float64; in float32 where the model cannot, or where
    its random masks would be others.
    """
    program = model.build(checkouts, jnp.bfloat16, "tiny")
    arguments = (disturbed(program.init(jax.random.key(0))), *program.batch)
    plain = jax.device_get(jax.jit(jax.value_and_grad(program.loss))(*arguments))
    ours = jax.device_get(jax.jit(jax.value_and_grad(by_reference(program.loss)))(*arguments))
    for reference, dtype in (("float64", jnp.float64), ("float32", jnp.float32)):
        try:
            with jax.enable_x64(reference == "float64"):
                exact = exactly(model.build(checkouts, dtype, "tiny"), arguments)
        except (TypeError, ValueError):
            continue
        error, baseline, passed = judge(ours, plain, exact)
        if 0 < baseline < OTHER_MASKS:  # 0: the other run computes in the same dtypes
            return {
                "error": float(error),
                "baseline_error": float(baseline),
                "passed": passed,
                "median_ratio": median_ratio(ours, plain, exact),
                "reference": reference,
            }
    return None


OTHER_MASKS = 0.2
"""The least error of a program whose random masks are not the reference's."""


def median_ratio(ours: Any, plain: Any, exact: Any) -> float:
    """Returns the median of error over the plain program's error, of all arrays in which that has one."""
    trees = zip(*map(jax.tree.leaves, (ours, plain, exact)), strict=True)
    errors = (
        [float(np.max(np.abs(np.asarray(each, np.float64) - exact), initial=0.0)) for each in (own, other)]
        for own, other, exact in trees
    )
    return statistics.median(error / baseline for error, baseline in errors if baseline)


def exactly(program: Program, arguments: tuple[Any, ...]) -> Any:
    """Returns loss and gradients in the widest dtype that is enabled."""
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, arguments)
    return jax.device_get(jax.jit(jax.value_and_grad(program.loss))(*jax.tree.map(jnp.asarray, wide)))


def by_reference(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the fused function, whose operations run by their XLA references."""

    def fused(*arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        closed = jax.make_jaxpr(fn)(*arguments)
        (result,) = evaluate(make_plan(closed.jaxpr), [*closed.consts, *leaves], implementation="xla")
        return result

    return fused


def disturbed(params: Any) -> Any:
    """Adds noise, since a kernel that ignored scales of one and biases of zero would pass."""
    generator = np.random.default_rng(0)

    def moved(each: Any) -> Any:
        if not jnp.issubdtype(each.dtype, jnp.floating):
            return each
        return each + jnp.asarray(0.05 * generator.standard_normal(each.shape), each.dtype)

    return jax.tree.map(moved, params)


def page(text: str, results: dict[str, Any], measured: Results) -> str:
    """Fills the document's tables from the results, and from those of `xlafuse bench public`."""
    refused: collections.Counter[str] = collections.Counter()
    for found in results.values():
        refused.update(found.get("gradient", {}).get("refused", {}))
    reasons = [
        [*each.replace("|", "\\|").partition(": ")[::2], str(count)]
        for each, count in refused.most_common(MOST_REASONS)
    ]
    checks = ([name, *_check(found.get("numerics"))] for name, found in results.items())
    sources = ([name, found["source"], found.get("size", "")] for name, found in results.items())
    tables = {
        "programs": (
            "model | program | kernels | sites left to XLA | refused | launches | MB | estimated µs",
            "lllrrrrr",
            _programs(results),
        ),
        "times": (
            "model | program | size | XLA, ms | estimated | `fuse` | gain | with allowances | PyTorch, eager | "
            "`torch.compile` | over `fuse` | CUDA graphs | over `fuse` | max-autotune | over `fuse`",
            "lllrrrrrrrrrrrr",
            _times(results, measured),
        ),
        "errors": ("model | rule | error | error of the program as it is | median ratio", "llrrr", checks),
        "reasons": ("operation | reason | lines", "llr", reasons),
        "sources": ("model | source | size", "lll", sources),
    }
    newest = Results(runs=tuple(run for run in measured.runs if run.environment.packages))
    text = place(text, model_table(newest) if newest.runs else "Not measured yet.", "details")
    for marker, (header, align, rows) in tables.items():
        text = place(text, markdown_table(*_filled(header.split(" | "), [*rows], align)), marker)
    return text


def _filled(header: list[str], rows: list[list[str]], align: str) -> tuple[list[str], list[list[str]], str]:
    """Returns a table without the columns in which no row has anything."""
    filled = [place for place in range(len(header)) if any(row[place] for row in rows)]
    picked = [[each[place] for place in filled] for each in (header, align, *rows)]
    return picked[0], picked[2:], "".join(picked[1])


def _programs(results: dict[str, Any]) -> Iterator[list[str]]:
    for name, part, found in (
        (n, part, each[part]) for n, each in results.items() for part in PARTS[1:] if part in each
    ):
        kernels = ", ".join(f"{count} {operation}" for operation, count in found["taken"].items()) or "none"
        cells = ["not compiled"] * 3
        if before := found.get("before"):
            after = found["after"] or before
            scales = {"launches": 1, "bytes": 1e-6, "us": 1}
            cells = [f"{before[key] * scale:,.0f} → {after[key] * scale:,.0f}" for key, scale in scales.items()]
            cells[-1] += ", worse" if is_worse(found) else ""
        left, refused = (sum(found[outcome].values()) for outcome in ("left", "refused"))
        yield [name, part, kernels, str(left), str(refused), *cells]


def _times(results: dict[str, Any], measured: Results) -> Iterator[list[str]]:
    cases = {(each.op, each.phase): each for each in measured.shapes}  # the last one counts
    shown = {**TIMED, "decode": "decode"}
    for name, part, found in ((n, part, each.get(part, {})) for n, each in results.items() for part in shown):
        if case := cases.get((name, shown[part])):
            guess = found.get("estimated", {})
            guessed = [f"{guess[key] / 1e3:.1f}" for key in ("us", "most_us") if key in guess]
            estimate = " to ".join(guessed) if guess.get("size") == case.spec else ""
            ms, gain = partial(_cell, case), partial(_cell, case, over="fused")
            cells = [ms("xla"), estimate, ms("fused"), gain("xla"), ms("fused_allowed"), ms("torch_eager")]
            cells += [cell(peer) for peer in [*TORCH_MODES][1:] for cell in (ms, gain)]
            yield [name, part, case.spec, *cells]


def _cell(case: ShapeResult, name: str, over: str = "") -> str:
    """Returns a candidate's wall clock in ms, or over another's; nothing where one was not measured."""
    wall = {each.name: each.timing.wall_us for each in case.candidates}
    if name not in wall or (over and over not in wall):
        return ""
    ms = wall[name] / 1e3
    return f"{wall[name] / wall[over]:.2f}" if over else f"{ms:.{2 if ms < 10 else 1}f}"


def _check(numerics: dict[str, Any] | None) -> list[str]:
    if not numerics:
        return ["not checked", "", "", ""]
    errors = [f"{numerics[name]:.2g}" for name in ("error", "baseline_error")]
    rule = f"{'kept' if numerics['passed'] else 'broken'}, against {numerics['reference']}"
    return [rule, *errors, f"{numerics['median_ratio']:.2f}"]


MOST_REASONS = 15


if __name__ == "__main__":
    sys.exit(main())
