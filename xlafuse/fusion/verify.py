"""Compares a planned program with the plain one, on random arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr  # pyright: ignore[reportAttributeAccessIssue]

from xlafuse.fusion.evaluate import evaluate
from xlafuse.fusion.plan import Plan


class FuseNumericsError(AssertionError):
    """The rewritten program and the plain one differ by more than rounding."""


def check_numerics(name: str, plan: Plan, closed: Any) -> None:
    """Runs both programs and compares their results.

    Floating arguments are random normal, integers and booleans zeros and ones; what the function closes over is taken
    as it is, or random where it is traced.

    Raises:
        FuseNumericsError: a result differs by more than 64 units in the last place of its largest magnitude.
    """
    generator = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        consts = [_random(generator, jax.typeof(each)) if isinstance(each, Tracer) else each for each in closed.consts]
        arguments = [_random(generator, var.aval) for var in closed.jaxpr.invars]
        plain = eval_jaxpr(closed.jaxpr, consts, *arguments)
        fused = evaluate(plan, [*consts, *arguments])
        for place, (ours, theirs) in enumerate(zip(fused, plain, strict=True)):
            if not jnp.issubdtype(jnp.asarray(theirs).dtype, jnp.floating):
                continue
            ours, theirs = (np.asarray(jnp.asarray(each, jnp.float32)) for each in (ours, theirs))
            bound = (
                64 * float(jnp.finfo(jnp.asarray(plain[place]).dtype).eps) * float(np.max(np.abs(theirs), initial=0.0))
            )
            largest = float(np.max(np.abs(ours - theirs), initial=0.0))
            if not largest <= bound:
                raise FuseNumericsError(
                    f"fuse: result {place} of {name} differs by {largest:g} from the plain program's; rounding "
                    f"explains {bound:g}. Please report this; until then name the operations to look for in ops=."
                )


def _random(generator: np.random.Generator, aval: Any) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.asarray(generator.standard_normal(aval.shape), aval.dtype)
    return jnp.asarray(generator.integers(0, 2, aval.shape), aval.dtype)
