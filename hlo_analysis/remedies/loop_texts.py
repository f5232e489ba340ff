"""Texts of the remedies for values that a loop carries, takes or returns."""

from __future__ import annotations

from hlo_analysis.remedies.texts import rewrite

MOST_STEPS = 64
"""The most steps that a Python loop is told for: it makes a copy of the body for each, which XLA compiles."""

UNSTACKED = rewrite(
    "keep the parts apart (a Python loop over a list in place of lax.scan over one stacked array), so that none "
    "is copied out of the stack"
)
STACKED = rewrite(
    "keep what each step leaves apart (a Python loop, whose results are a list, in place of lax.scan), so that it "
    "is written where it stays and not copied into a stack; what the backward pass alone needs may be computed again "
    "(a policy of jax.checkpoint that does not save it)"
)
UNROLLED = rewrite(
    "unroll the loop by two, four or more (unroll= of lax.scan and lax.fori_loop): XLA copies the parts of "
    "several steps out of a stack or into it in one launch, and fuses what lies between them",
    code="jax.lax.scan(body, state, xs, unroll=4)",
    portion=0.5,
)
STACKED_FIRST = rewrite(
    "stack on the axis that is scanned, axis 0, where the array is stored (of weights jnp.stack(layers), "
    "variable_axes={'params': 0} of nn.scan, param_scan_axis=0; of sequences the time), and take its gradient so: "
    "else all of it is transposed in each call, and lies in memory twice",
    code="# before: jax.lax.scan(body, x, jnp.moveaxis(w, 1, 0))\n"
    "w = jnp.stack(layers)  # stored with the layers on axis 0\njax.lax.scan(body, x, w)",
)
TRANSPOSED_IN_BODY = rewrite(
    "transpose each step's slice in the loop's body, x @ w.T, in place of the whole stack before or after the "
    "loop: a product takes either order as it lies",
    code="# before: jax.lax.scan(body, x, w.swapaxes(1, 2)), whose body does x @ w\n"
    "jax.lax.scan(body, x, w)  # whose body does x @ w.T",
)
APART = rewrite(
    "keep what the loop gives apart (a Python loop, whose results are a list, in place of lax.scan), or give it "
    "an array to update that is there anyway: here one value is written everywhere first"
)
GIVEN = rewrite(
    "give the loop an array to update that is there anyway (as the state of lax.fori_loop, a donated argument); "
    "in a gradient keep less for the backward pass, jax.lax.scan(jax.checkpoint(body), ...): here one value is "
    "written everywhere first"
)
HOISTED = rewrite(
    "take the product out of the loop: one product of all steps (of the whole stacked array) before it, of which "
    "the loop reads its part"
)
INVARIANT = rewrite("compute it before the loop, whose runs all compute the same of the same arguments")
DRAWN = rewrite(
    "draw the random numbers of all steps before the loop, where memory allows, and have lax.scan hand each step "
    "its own: a step's launches then only compute its state",
    code="random = jax.vmap(draw)(jax.random.split(key, steps))\njax.lax.scan(body, state, random)",
)
RECOMPUTED = rewrite(
    "compute again what a step leaves for the backward pass, jax.lax.scan(jax.checkpoint(body), ...), or keep "
    "products alone (policy=jax.checkpoint_policies.dots_saveable): XLA writes each kept value to its stack in a "
    "launch of its own, and each of these reads the same inputs",
    code="jax.lax.scan(jax.checkpoint(body), state, xs)",
)
SUMMED_AFTER = rewrite(
    "keep the factors of all steps, where memory allows, and multiply once after the loop: here each step adds a "
    "product of its own to a whole array. Of a scan's gradient: take x @ w out of its body, or give it a custom_vjp; "
    "of gradients that a loop accumulates: fewer, larger parts"
)
STATE = rewrite(
    "unroll the loop by two (unroll= of lax.scan and lax.fori_loop): what makes its next state reads the old one, "
    "so that XLA writes it elsewhere and copies it back; of two iterations the second can write in its place",
    code="jax.lax.scan(body, state, xs, unroll=2)",
    portion=0.5,
)
CARRIED = rewrite(
    "unroll the loop by two or more (unroll= of lax.scan and lax.fori_loop, as which lax.while_loop may be "
    "written), so that XLA sees several iterations at once; one kernel for the whole loop keeps on the chip what one "
    "iteration hands the next",
    code="jax.lax.scan(body, state, xs, unroll=2)",
    portion=0.5,
)
