"""Loss and gradient of one row from its sums, for all kernels of cross-entropy.

With z the logits of a row, t its label, V the vocabulary, s the label smoothing and c the z-loss,

    loss = lse - (1 - s) z_t - s mean(z) + c lse^2,      lse = log(sum(exp(z)))
    dz_j = exp(z_j - lse) (1 + 2 c lse) - (1 - s) [j = t] - s / V

Where a label outside the vocabulary is a row of zeros, that row's target has the smoothing alone: its share 1 - s is 0,
and its mass, the 1 in front of lse and of exp(z_j - lse), is s.

Where possible the maximum is used rather than lse: at logits of 1e4 the float32 rounding of lse alone is a relative
error of 5e-4 in every probability. For 16-bit logits an exponential is 2^(z log2(e) - shift), one fused multiply-add
and one ex2, with the *same* rounded shift throughout a row: the shift's rounding error cancels in every quotient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.exponents import LOG2_E


@dataclass(frozen=True, kw_only=True)
class Exponential:
    """Computes exp(logit - maximum) from a shift that represents the maximum.

    is_binary: the shift is log2(e) times the maximum, rounded, for powers of 2; otherwise it is the maximum.
    """

    is_binary: bool

    def shift(self, maximum):
        """Returns the shift of a maximum; it grows with the maximum."""
        return maximum * LOG2_E if self.is_binary else maximum

    def __call__(self, logits: jax.Array, shift: jax.Array) -> jax.Array:
        """Computes the exponentials of float32 logits."""
        return jnp.exp2(logits * LOG2_E - shift) if self.is_binary else jnp.exp(logits - shift)

    def ratio(self, before: jax.Array, after: jax.Array) -> jax.Array:
        """Returns the factor that converts exponentials under one shift to another shift."""
        return jnp.exp2(before - after) if self.is_binary else jnp.exp(before - after)

    def total(self, total: jax.Array, shift: jax.Array, maximum: jax.Array) -> jax.Array:
        """Turns a sum under a shift into the sum of exp(logit - maximum), without the shift's rounding error."""
        return total * jnp.exp2(shift - maximum * LOG2_E) if self.is_binary else total


NATURAL = Exponential(is_binary=False)


def logarithm(x: jax.Array) -> jax.Array:
    """Computes log(x) of a float32 scalar x >= 1/2 to an ulp. The kernels' logarithm is approximate for 16-bit types.

    The result is NaN for 0 and for x that is not finite. Source of the polynomial, in s = f / (2 + f) for x = 2^k (1 +
    f) with 1 + f from sqrt(1/2) to sqrt(2): fdlibm, e_logf.c of FreeBSD, https://www.netlib.org/fdlibm/
    """
    k = (jnp.log(x) * LOG2_E + 0.5).astype(jnp.int32).astype(jnp.float32)
    f = x * jnp.exp2(-k) - 1
    s = f / (2 + f)
    z = s * s
    polynomial = z * (0.66666662693 + z * (0.40000972152 + z * (0.28498786688 + z * 0.24279078841)))
    half = 0.5 * f * f
    return k * 6.9313812256e-01 - ((half - (s * (half + polynomial) + k * 9.0580006145e-06)) - f)


@dataclass(frozen=True, kw_only=True)
class Token:
    """A row's label, and the weight of its loss.

    label: the label, or a valid token in place of an invalid one. is_valid: whether the row counts. offset: the loss if
    it does not. weight: the factor of the loss, 0 if it does not. share, mass: of the target, at the label and in all.
    """

    label: jax.Array
    is_valid: jax.Array
    weight: jax.Array
    offset: jax.Array
    share: jax.Array | float
    mass: jax.Array | float


def weight_of(load: Callable[[Any], jax.Array], ref: Any = None) -> jax.Array | float:
    """Returns the factor of the loss of a row, or of each of several.

    load: reads one value a row from a reference. ref: None for a factor of 1; (rows,) or (1,) weights; or (1,) int32,
    the number of tokens of a mean.
    """
    if ref is None:
        return 1.0
    if jnp.issubdtype(ref.dtype, jnp.integer):
        count = jnp.maximum(ref[0], 1).astype(jnp.float32)
        weight = 1 / count
        return weight + weight * (1 - count * weight)  # exact, though a kernel's division is not
    return load(ref) if ref.shape[0] > 1 else ref[0]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The static numbers of a call.

    ignore_index: the label of rows that do not count. is_one_hot: whether other labels outside the vocabulary are rows
    of zeros, as `jax.nn.one_hot` makes them, and not NaN.
    """

    vocabulary: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -1
    is_one_hot: bool = False

    def token(self, label: jax.Array, weight: jax.Array | float) -> Token:
        """Returns the token of an int32 label."""
        is_ignored, is_counted = label == self.ignore_index, label != self.ignore_index
        is_valid = is_counted & (label >= 0) & (label < self.vocabulary)
        label, share, mass = jnp.where(is_valid, label, 0), 1 - self.label_smoothing, 1
        if self.is_one_hot:
            share = jnp.where(is_valid, jnp.float32(share), jnp.float32(0))
            mass = share + self.label_smoothing
            is_valid = is_counted
        return Token(
            label=label,
            is_valid=is_valid,
            share=share,
            mass=mass,
            weight=jnp.where(is_valid, jnp.asarray(weight, jnp.float32), jnp.float32(0)),
            offset=jnp.where(is_ignored, jnp.float32(0), jnp.float32(jnp.nan)),
        )

    def loss(
        self, token: Token, maximum: jax.Array, total: jax.Array, target: jax.Array, logit_sum: jax.Array | None
    ) -> jax.Array:
        """Computes the loss of a row, times its weight.

        maximum: of the row's logits. total: sum(exp(logit - maximum)). target: the label's logit. logit_sum: of all
        logits, given where there is label smoothing. All float32 scalars.
        """
        log_sum = logarithm(total)
        loss = token.mass * log_sum - token.share * (target - maximum)
        if logit_sum is not None:
            loss -= self.label_smoothing * (logit_sum * (1 / self.vocabulary) - maximum)
        if self.z_loss:
            loss += self.z_loss * (maximum + log_sum) * (maximum + log_sum)
        return jnp.where(token.is_valid, loss * token.weight, token.offset)

    def slope(
        self,
        maximum: jax.Array,
        total: jax.Array,
        token: Token,
        *,
        exponential: Exponential = NATURAL,
        shift: jax.Array | None = None,
    ) -> Slope:
        """Returns the parameters of a row's gradient, times its weight. total: under the shift, if one is given."""
        factor, mass = token.weight / total, token.mass
        if self.z_loss:
            mass += 2 * self.z_loss * (maximum + logarithm(total))
        return Slope(
            exponential=exponential,
            shift=maximum if shift is None else shift,
            factor=factor * mass,
            everywhere=token.weight * (self.label_smoothing / self.vocabulary) if self.label_smoothing else None,
            at_label=token.weight * token.share,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Slope:
    """Gradients: factor * exp(logit - maximum) - everywhere - (at the label) at_label."""

    exponential: Exponential = field(metadata={"static": True})
    shift: jax.Array
    factor: jax.Array
    everywhere: jax.Array | None
    at_label: jax.Array

    def __call__(self, logits: jax.Array, is_label: jax.Array | None = None) -> jax.Array:
        """Returns the float32 gradients of some logits of the row. is_label: None if the label is not among them."""
        gradient = self.exponential(logits, self.shift) * self.factor
        if self.everywhere is not None:
            gradient -= self.everywhere
        return gradient if is_label is None else jnp.where(is_label, gradient - self.at_label, gradient)
