"""Names what a program computes in its author's words."""

from __future__ import annotations

from xlafuse.fusion.graph import Equation, Value

_NOUNS = {
    "add": "an addition", "add_any": "an addition", "sub": "a subtraction", "mul": "a multiplication",
    "div": "a division", "neg": "a negation", "convert_element_type": "a cast", "select_n": "jnp.where",
    "clamp": "jnp.clip", "integer_pow": "a power", "pow": "a power", "rsqrt": "lax.rsqrt",
    "logistic": "jax.nn.sigmoid", "max": "jnp.maximum", "min": "jnp.minimum", "eq": "a comparison",
    "ne": "a comparison", "le": "a comparison", "lt": "a comparison", "ge": "a comparison", "gt": "a comparison",
    "erf": "lax.erf", "erfc": "lax.erfc", "iota": "jnp.arange", "gather": "indexing",
    "dynamic_slice": "a slice", "dynamic_update_slice": "an update in place", "concatenate": "a concatenation",
    "reduce_sum": "a sum", "reduce_max": "a maximum", "reduce_min": "a minimum", "reduce_prod": "a product",
    "cumsum": "jnp.cumsum", "dot_general": "a matrix product", "ragged_dot_general": "lax.ragged_dot",
    "conv_general_dilated": "a convolution", "scan": "a loop", "while": "a loop", "cond": "a branch",
    "and": "a logical and", "or": "a logical or", "not": "a logical not", "rev": "jnp.flip", "pad": "jnp.pad",
    "slice": "a slice", "random_bits": "random numbers", "rem": "a remainder", "stop_gradient": "lax.stop_gradient",
}  # fmt: skip
_OF_JNP = frozenset((
    "abs", "ceil", "cos", "exp", "exp2", "expm1", "floor", "log", "log1p", "round", "sign", "sin", "sqrt", "square",
    "tan", "tanh",
))  # fmt: skip


def noun(value: Value) -> str:
    """Returns what computes a value, with an article or a module: "a sum", "jnp.where"; "an array" for an input."""
    if value.equation is None:
        return "an array" if value.literal is None else "a number"
    name = value.primitive
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return _function(value.equation)
    return _NOUNS.get(name) or (f"jnp.{name}" if name in _OF_JNP else f"lax.{name}")


def _function(call: Equation) -> str:
    """Returns the name of a function with derivatives of its own."""
    inner = call.params.get("call_jaxpr") or call.params.get("fun_jaxpr")
    where = getattr(getattr(getattr(inner, "jaxpr", None), "debug_info", None), "func_src_info", None) or ""
    return where.partition(" at ")[0] or "a function with derivatives of its own"


def listed(words: list[str]) -> str:
    """Joins words: "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
