"""Follows remedies on the programs of tests/programs, compiles them again, and prints the tables of docs/advice.md.

`python scripts/check_advice.py [PROGRAM ...]`: needs the extra 'deviceless' and no GPU.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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

PROGRAMS = Path(__file__).resolve().parents[1] / "tests" / "programs"


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What a remedy changes: XLA's options, donated arguments, and pieces of the source by what replaces them.

    remedy: a part of its text. Its estimate is the sum of `remaining_us` of all missed fusions with it.
    also: a part of the text of another remedy that the same change follows.
    """

    program: str
    remedy: str
    also: str = ""
    options: tuple[tuple[str, str], ...] = ()
    donated: tuple[int, ...] = ()
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
        program="haiku_lm",
        remedy="cross_entropy: ",
        changes=(
            ("    labels = jax.nn.one_hot(targets, VOCABULARY)\n", "    from xlafuse.kernels import cross_entropy\n"),
            (
                "-jnp.sum(jnp.sum(labels * jax.nn.log_softmax(logits), -1) * mask)",
                "jnp.sum(cross_entropy(logits, targets) * mask)",
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
        program="cartpole",
        remedy="draw the random numbers of all steps",
        changes=(
            (
                "def advance(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:\n"
                "    state, key = carry\n"
                "    key, action_key, start_key = jax.random.split(key, 3)\n",
                "def draw(key):\n"
                "    first, second = jax.random.split(key)\n"
                "    start = jax.random.uniform(second, (CARTS, 4), minval=-0.05, maxval=0.05)\n"
                "    return jax.random.bernoulli(first, 0.5, (CARTS,)), start\n\n\n"
                "def advance(state, random):\n"
                "    is_pushed, start = random\n",
            ),
            ("jax.random.bernoulli(action_key, 0.5, x.shape)", "is_pushed"),
            ("    start = jax.random.uniform(start_key, state.shape, minval=-0.05, maxval=0.05)\n", ""),
            (
                "(jnp.where(is_over[:, None], start, state), key), None",
                "jnp.where(is_over[:, None], start, state), None",
            ),
            (
                "(state, jax.random.wrap_key_data(seed)), None, length=STEPS)[0][0]",
                "state, jax.vmap(draw)(jax.random.split(jax.random.wrap_key_data(seed), STEPS)))[0]",
            ),
        ),
    ),
    Followed(
        program="dlrm",
        remedy="update only the rows",
        donated=(0, 1),
        changes=(
            (
                'table[indices].sum(1) for table, indices in zip(weights["tables"], sparse, strict=True)',
                'rows.sum(1) for rows in weights["tables"]',
            ),
            (
                "    value, gradients = jax.value_and_grad(loss)(weights, dense, sparse, clicks)\n"
                "    updates, state = OPTIMIZER.update(gradients, state, weights)\n"
                "    return optax.apply_updates(weights, updates), state, value\n",
                "    tables, sums = weights['tables'], state[0].sum_of_squares\n"
                "    weights = weights | {'tables': [table[at] for table, at in zip(tables, sparse)]}\n"
                "    value, gradients = jax.value_and_grad(loss)(weights, dense, sparse, clicks)\n"
                "    scaled = lambda g, new: -0.01 * g * jnp.where(new > 0, jax.lax.rsqrt(new + 1e-7), 0.0)\n"
                "    for name in ('bottom', 'top'):\n"
                "        sums[name] = jax.tree.map(lambda g, old: g * g + old, gradients[name], sums[name])\n"
                "        updates = jax.tree.map(scaled, gradients[name], sums[name])\n"
                "        weights[name] = jax.tree.map(jnp.add, weights[name], updates)\n"
                "    for number, (g, at) in enumerate(zip(gradients['tables'], sparse)):\n"
                "        sums['tables'][number] = sums['tables'][number].at[at].add(g * g)\n"
                "        tables[number] = tables[number].at[at].add(scaled(g, sums['tables'][number][at]))\n"
                "    return weights | {'tables': tables}, sums, value\n",
            ),
        ),
    ),
    Followed(
        program="vae",
        remedy="give a transposed convolution",
        changes=(
            (
                'x = jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS)',
                "kernel = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)\n"
                "        x = jax.lax.conv_transpose(\n"
                '            x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS, transpose_kernel=True\n        )',
            ),
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


def compiled(name: str, followed: Followed | None = None) -> Analysis:
    """The analysis of a program, as it is or as a remedy changes it."""
    module = module_of(name, followed.changes if followed else ())
    step = jax.jit(module.step, donate_argnums=followed.donated if followed else ())
    options = dict(followed.options) if followed else {}
    captured = capture(step, *module.arguments(), target="h200", compiler_options=options)
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


def main(names: list[str]) -> None:
    """Prints the tables."""
    head = "| program | best rank | remedy | estimated gain, µs | launches saved | MB saved | estimated µs saved |"
    print(f"{head}\n| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    before: dict[str, Analysis] = {}
    for followed in FOLLOWED:
        if not names or followed.program in names:
            if followed.program not in before:
                before[followed.program] = compiled(followed.program)
            print(row(before[followed.program], followed), flush=True)
    print(f"\n{head}\n| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for name in names or sorted(path.stem for path in PROGRAMS.glob("[!_]*.py")):
        for found in tried(name):
            print(found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
