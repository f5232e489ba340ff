"""Follows remedies on the programs of tests/programs, compiles them again, and prints the tables of docs/advice.md.

python scripts/check_advice.py [PROGRAM ...]                 # needs the extra 'deviceless' and no GPU
python scripts/check_advice.py [PROGRAM ...] --measure FILE [--tried 4]  # times of those followed by hand, on a GPU
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax

from hlo_analysis import Analysis, analyze, capture
from hlo_analysis.errors import CaptureError
from hlo_analysis.records import MissedFusion, Trial
from xlafuse import try_remedies
from xlafuse.catalogue import KERNELS
from xlafuse.fusion.program import FusedProgram
from xlafuse.fusion.spellings import operations

PROGRAMS = Path(__file__).resolve().parents[1] / "tests" / "programs"


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What a remedy changes: XLA's options, and pieces of the source by what replaces them.

    remedy: a part of its text. Its estimate is the sum of `remaining_us` of all missed fusions with it.
    also: a part of the text of another remedy that the same change follows.
    """

    program: str
    remedy: str
    also: str = ""
    options: tuple[tuple[str, str], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()


ALSO = {"cross_entropy": "jnp.take_along_axis"}
"""By operation, a part of the text of another remedy that it follows: this loss no longer picks by indices."""
_SPLIT = (("xla_gpu_experimental_force_split_k", "1"),)
_MASK = (
    "-jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()",
    "-jnp.where(jnp.arange(VOCABULARY) == targets[..., None], jax.nn.log_softmax(logits), 0).sum(-1).mean()",
)
FOLLOWED = (
    Followed(
        program="experts", remedy="unique_indices=True", changes=(('mode="drop"', 'mode="drop", unique_indices=True'),)
    ),
    Followed(program="graphnet", remedy="force_split_k", options=_SPLIT),
    Followed(program="cartpole", remedy="unroll the loop", changes=(("length=STEPS)", "length=STEPS, unroll=2)"),)),
    Followed(
        program="lm1b",
        remedy="; linear_cross_entropy does not take this",
        also=ALSO["cross_entropy"],
        changes=(
            (
                '(x @ weights["embedding"].astype(x.dtype).T).astype(jnp.float32)',
                'x @ weights["embedding"].astype(x.dtype).T',
            ),
            (
                "optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()",
                "__import__('xlafuse').kernels.cross_entropy(logits, targets).mean()",
            ),
        ),
    ),
    Followed(
        program="bert",
        remedy="attention: ",
        changes=(
            (
                "    scores = query @ key.swapaxes(2, 3) / (WIDTH // HEADS) ** 0.5\n"
                "    scores = scores + jnp.where(is_token, 0, -1e9)[:, None, None, :].astype(x.dtype)\n"
                "    out = (jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ value).swapaxes(1, 2)\n",
                "    given = [x.swapaxes(1, 2) for x in (query, key, value)]\n"
                "    mask = jnp.broadcast_to(is_token[:, None, None, :].astype(bool), (BATCH, 1, LENGTH, LENGTH))\n"
                '    out = jax.nn.dot_product_attention(*given, mask=mask, implementation="cudnn")\n',
            ),
        ),
    ),
    Followed(program="gru", remedy="jax.checkpoint(body)", changes=(("scan(advance", "scan(jax.checkpoint(advance)"),)),
    Followed(
        program="gru",
        remedy="take the product out of the loop",
        changes=(
            ('x @ weights["input"] + weights["bias"]', "x"),
            ("sequences.swapaxes(0, 1)", 'sequences.swapaxes(0, 1) @ weights["input"] + weights["bias"]'),
        ),
    ),
    Followed(
        program="kmeans",
        remedy="compute it before the loop",
        changes=(
            ("        squares = jnp.square(points).sum(-1)[:, None]\n", ""),
            ("    def advance(_", "    squares = jnp.square(points).sum(-1)[:, None]\n\n    def advance(_"),
        ),
    ),
    Followed(
        program="mixer",
        remedy="jax.checkpoint around",
        also="which keeps the product alone",
        changes=(("jax.nn.gelu(x", "jax.checkpoint(jax.nn.gelu)(x"),),
    ),
    Followed(program="bert", remedy="jnp.take_along_axis", changes=(_MASK,)),
    Followed(
        program="lm1b",
        remedy="jnp.take_along_axis",
        changes=(("optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()", _MASK[1]),),
    ),
    Followed(
        program="pointnet",
        remedy="split the weight",
        changes=(
            (
                'jnp.concatenate([local, spread], -1) @ first["weight"]',
                'local @ first["weight"][: LOCAL[-1]] + (pooled @ first["weight"][LOCAL[-1] :])[:, None]',
            ),
        ),
    ),
)


def module_of(name: str, changes: Sequence[tuple[str, str]] = ()) -> ModuleType:
    """A program's module, with pieces of its source replaced."""
    source = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{name}.py has {old!r} {source.count(old)} times, expected once: mend FOLLOWED")
        source = source.replace(old, new)
    module = ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def compiled(name: str, followed: Followed | None = None, *, measure: bool = False) -> Analysis:
    """The analysis of a program, as it is or as a remedy changes it; measured on the attached GPU if asked."""
    module = module_of(name, followed.changes if followed else ())
    options = dict(followed.options) if followed else {}
    target = "attached" if measure else "h200"
    captured = capture(
        jax.jit(module.step), *module.arguments(), target=target, compiler_options=options, measure=measure
    )
    return analyze(captured, label=name, catalogue=KERNELS)


def row(before: Analysis, followed: Followed) -> str:
    """One line of the table of remedies followed by hand."""
    parts = [part for part in (followed.remedy, followed.also) if part]
    advised = [missed for missed in before.missed if any(part in missed.remedy for part in parts)]
    try:
        after = compiled(followed.program, followed)
    except CaptureError as error:
        return f"| {followed.program} | | {followed.remedy} | {error} | | | |"
    trial = Trial(
        change=f"`{followed.remedy}`",
        saved_launches=before.launch_count - after.launch_count,
        saved_bytes=before.traffic.bytes - after.traffic.bytes,
        saved_us=before.estimated_us - after.estimated_us,
    )
    return line(followed.program, trial, advised)


def measured_us(analysis: Analysis) -> float:
    """Microseconds of a call: its kernels', or the wall clock where the GPU waits between launches."""
    measured = analysis.measured
    if measured is None or measured.wall_us is None:
        raise RuntimeError(f"not measured: {analysis.provenance.notes}")
    kernels, is_long = measured.kernel_us or 0.0, analysis.launch_count > 100
    return max(kernels, measured.wall_us if is_long or not kernels else 0.0)


def measure(names: Sequence[str], output: Path, count: int) -> int:
    """Follows the remedies on the attached GPU and writes each one's times; returns how many failed."""
    lines: list[dict[str, Any]] = []

    def add(program: str, remedy: str, found: Callable[[], Iterable[Analysis]]) -> None:
        made: dict[str, Any] = {"program": program, "remedy": remedy}
        try:
            both = list(found())
            made["estimated_us"] = [round(each.estimated_us, 1) for each in both]
            made["measured_us"] = [round(measured_us(each), 1) for each in both]
        except Exception as error:  # the others are worth having
            made["error"] = f"{type(error).__name__}: {error}"[:300]
        lines.append(made)
        print(json.dumps(made), flush=True)
        output.write_text(json.dumps({"lines": lines}, indent=1) + "\n", encoding="utf-8")

    for name in names or sorted({each.program for each in FOLLOWED}):
        both = functools.partial(map, functools.cache(functools.partial(compiled, name, measure=True)))
        for followed in FOLLOWED:
            if followed.program == name:
                add(name, followed.remedy, functools.partial(both, (None, followed)))
        if count:
            measure_tried(name, count, add)
    return sum("error" in each for each in lines)


def measure_tried(name: str, count: int, add: Callable[[str, str, Callable[[], Iterable[Analysis]]], None]) -> None:
    """Measures the first remedies that are options of XLA or operations of `fuse`, each alone, in a program's loss."""
    fn, shapes, mode = differentiated(name)

    def made(fn: Callable[..., Any], options: Sequence[tuple[str, str]] = ()) -> Analysis:
        captured = capture(fn, *shapes, target="attached", mode=mode, compiler_options=dict(options), measure=True)
        return analyze(captured, label=name, catalogue=KERNELS)

    before = made(fn)
    changes: dict[str, Callable[[], Analysis]] = {}
    for each in (*before.hotspots, *before.missed):
        if each.options:
            said = " ".join(f"{option}={value}" for option, value in each.options)
            changes[said] = functools.partial(made, fn, each.options)
        elif each.kernel in operations():
            changes[each.kernel] = lambda kernel=each.kernel: made(FusedProgram(fn, ops=[kernel]).function)
    for remedy in list(changes)[:count]:
        add(name, remedy, lambda each=changes[remedy]: (before, each()))


def line(program: str, trial: Trial, advised: Sequence[MissedFusion]) -> str:
    """One line of a table: the best rank and the summed worth of the missed fusions, and what their remedy saves."""
    rank = str(advised[0].rank) if advised else "not given"
    estimate = sum(missed.remaining_us for missed in advised)
    if trial.error:
        return f"| {program} | {rank} | {trial.change} | {estimate:.1f} | {trial.error} | | |"
    saved = f"{trial.saved_launches:+d} | {trial.saved_bytes / 1e6:+.1f} | {trial.saved_us:+.1f}"
    return f"| {program} | {rank} | {trial.change} | {estimate:.1f} | {saved} |"


def differentiated(name: str) -> tuple[Callable[..., Any], list[Any], Literal["forward", "grad"]]:
    """A program's loss and the shapes of its arguments, since `fuse` comes before the gradient; else its step."""
    module = module_of(name)
    if not hasattr(module, "loss"):
        return module.step, list(module.arguments()), "forward"
    given = dict(zip(inspect.signature(module.step).parameters, module.arguments(), strict=True))
    given.pop("state", None)
    seed = list(given).index("seed") if "seed" in given else None

    def loss(*arguments: Any) -> Any:
        keyed = [jax.random.wrap_key_data(x) if number == seed else x for number, x in enumerate(arguments)]
        return jax.tree.leaves(module.loss(*keyed))[0]

    return loss, list(given.values()), "grad"


def tried(name: str, count: int = 5) -> Iterator[str]:
    """Lines of the table of remedies that `try_remedies` compiles again."""
    fn, shapes, mode = differentiated(name)
    analysis = analyze(capture(fn, *shapes, target="h200", mode=mode), label=name, catalogue=KERNELS)
    advised: dict[Trial, list[MissedFusion]] = defaultdict(list)
    all_missed = try_remedies(analysis, fn, *shapes, count=count).missed
    for missed in all_missed:
        if missed.trial:
            advised[missed.trial].append(missed)
    for trial, found in advised.items():
        also = ALSO.get(found[0].kernel or "")
        yield line(name, trial, [*found, *(missed for missed in all_missed if also and also in missed.remedy)])


def main() -> int:
    """Prints the tables, or measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="follow by hand on the attached GPU")
    parser.add_argument("--tried", type=int, default=0, metavar="N", help="then the first N others, one at a time")
    options = parser.parse_args()
    if options.measure:
        os.environ["JAX_PLATFORMS"] = "cpu"  # tracing needs no GPU
        return measure(options.programs, options.measure, options.tried)
    names = options.programs or sorted(path.stem for path in PROGRAMS.glob("[!_]*.py"))
    head = "| program | best rank | remedy | estimated gain, µs | launches saved | MB saved | estimated µs saved |"
    print(f"{head}\n| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    before = functools.cache(compiled)
    for followed in FOLLOWED:
        if followed.program in names:
            print(row(before(followed.program), followed), flush=True)
    print(f"\n{head}\n| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for name in names:
        for found in tried(name):
            print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
