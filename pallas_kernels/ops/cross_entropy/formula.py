"""Loss and gradient of one row from its sums: what all kernels of cross-entropy share.

With z the logits of a row, t its label, V the vocabulary, s the label smoothing and c the z-loss,

    loss = lse - (1 - s) z_t - s mean(z) + c lse^2,      lse = log(sum(exp(z)))
    dz_j = exp(z_j - lse) (1 + 2 c lse) - (1 - s) [j = t] - s / V

Nothing is computed from lse itself where the maximum can be kept apart: at logits of 1e4 its float32 rounding alone is
a relative error of 5e-4 in every probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The static numbers of a call."""

    vocabulary: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def score(self, maximum: jax.Array, target: jax.Array, logit_sum: jax.Array | None) -> jax.Array:
        """The part of a row's loss that its label decides, which a kernel returns beside maximum and total.

        target: the label's logit. logit_sum: of all logits, given where there is label smoothing. All float32.
        """
        score = (1 - self.label_smoothing) * (target - maximum)
        if logit_sum is not None:
            score += self.label_smoothing * (logit_sum * (1 / self.vocabulary) - maximum)
        return score

    def loss(self, score: jax.Array, maximum: jax.Array, total: jax.Array) -> jax.Array:
        """The loss of a row, for XLA to compute: its logarithm is exact, a kernel's in 16-bit types approximate.

        maximum: of the row's logits. total: sum(exp(logit - maximum)).
        """
        log_sum = jnp.log(total)
        loss = log_sum - score
        if self.z_loss:
            loss += self.z_loss * jnp.square(maximum + log_sum)
        return loss

    def slope(self, maximum: jax.Array, total: jax.Array, weight: jax.Array) -> Slope:
        """What the gradient of a row needs, times `weight`."""
        factor = weight / total
        if self.z_loss:
            factor *= 1 + 2 * self.z_loss * (maximum + jnp.log(total))
        return Slope(
            maximum=maximum,
            factor=factor,
            everywhere=weight * (self.label_smoothing / self.vocabulary) if self.label_smoothing else None,
            at_label=weight * (1 - self.label_smoothing),
        )


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Gradients: factor * exp(logit - maximum) - everywhere - (at the label) at_label."""

    maximum: jax.Array
    factor: jax.Array
    everywhere: jax.Array | None
    at_label: jax.Array

    def __call__(self, logits: jax.Array, is_label: jax.Array | None = None) -> jax.Array:
        """The float32 gradients of some logits of the row. is_label: None where the label is not among them."""
        gradient = jnp.exp(logits - self.maximum) * self.factor
        if self.everywhere is not None:
            gradient -= self.everywhere
        return gradient if is_label is None else jnp.where(is_label, gradient - self.at_label, gradient)
