"""Texts of what to do about launches that take longer than they need."""

from __future__ import annotations

from hlo_analysis.remedies.texts import Remedy, kernel, rewrite

ONE_HOT_PRODUCT = rewrite(
    "add by a product with a one-hot matrix, jax.nn.one_hot(ids, rows, axis=0) @ updates, which matrix units sum "
    "without atomics and in float32; a lookup of so few rows, jax.nn.one_hot(ids, rows) @ table, has this gradient",
    code="# before: jax.ops.segment_sum(updates, ids, rows); of a table's gradient: table[ids]\n"
    "sums = jax.nn.one_hot(ids, rows, dtype=updates.dtype, axis=0) @ updates\n"
    "taken = jax.nn.one_hot(ids, rows, dtype=table.dtype) @ table  # its gradient is such a product",
)
SORTED_SUMS = kernel(
    "sort the indices and add each row's updates in one place, without atomics. Where indices are sorted already, "
    "say so (indices_are_sorted=True), and unique_indices=True where none comes twice",
    pattern="embedding",
    code="order = jnp.argsort(ids)\n"
    "sums = jax.ops.segment_sum(updates[order], ids[order], rows, indices_are_sorted=True)",
)
MOVED_BY_INDEX = rewrite(
    "move the rows by their index: gather each expert's tokens, and each token's results. The product multiplies "
    "every row by zeros for all others, and its one-hot matrix is written and read. Or sort the tokens by expert and "
    "multiply with jax.lax.ragged_dot, which drops and pads none",
    code="# slot (tokens, choices): expert * capacity + position, and experts * capacity for tokens that are dropped\n"
    "token = jnp.full(experts * capacity, tokens).at[slot].set(jnp.arange(tokens)[:, None], mode='drop')\n"
    "rows = jnp.take(x, token, axis=0, mode='fill', fill_value=0)  # einsum('tec,td->ecd', dispatch, x)\n"
    "back = jnp.take(y, slot, axis=0, mode='fill', fill_value=0)  # einsum('tec,ecd->td', combine, y)\n"
    "out = jnp.einsum('tk,tkd->td', weights, back)",
)
APART = {
    opcode: Remedy(
        kind="option",
        options=((f"xla_gpu_{name}_combine_threshold_bytes", "0"),),
        text=f"xla_gpu_{name}_combine_threshold_bytes=0 leaves the arrays apart, so that each moves beside work that "
        "does not need it; a number of bytes joins small ones alone",
    )
    for opcode, name in (
        ("all-gather", "all_gather"),
        ("reduce-scatter", "reduce_scatter"),
        ("all-reduce", "all_reduce"),
    )
}
"""By the opcode of a collective of several arrays."""
SCHEDULED = Remedy(
    kind="option",
    options=(("xla_gpu_enable_analytical_latency_estimator", "True"),),
    text="xla_gpu_enable_analytical_latency_estimator=True has XLA's scheduler tell from sizes what takes as long as a "
    "collective, not by fixed costs, which take a custom kernel for a short one; measure both. What depends on the "
    "collective has to be cut into parts, so that the collective of one runs beside the work on the next",
)
FOUR_OF_A_WORD = rewrite(
    "make the mask of bytes, four of each random word, where the rate may be a multiple of 1/256: a quarter of "
    'the numbers. Or take another generator, jax.random.key(seed, impl="rbg"); measure both',
    code="words = jax.random.bits(key, (x.size // 4,), jnp.uint32)\n"
    "kept = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(x.shape) < 230  # of 256: a rate of 0.102",
)
DRAWN_ONCE = rewrite(
    "keep the mask for the backward pass, a byte an element: draw it outside of jax.checkpoint, or name it for "
    "the policy; threefry costs more than reading a byte",
    code="mask = jax.ad_checkpoint.checkpoint_name(jax.random.bernoulli(key, rate, x.shape), 'mask')\n"
    "layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names('mask'))",
)
THREE_PASSES = rewrite(
    "ask for less: precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 is nearly as exact as float32, in three "
    "passes of the matrix units; 'default' is TF32, in one",
    code="y = jnp.matmul(x, w, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3)",
)
SIXTEEN_BITS = rewrite(
    "multiply the 16-bit values themselves, with preferred_element_type=jnp.float32: their products are exact, "
    "and the sums stay float32",
    code="y = jnp.matmul(x, w, preferred_element_type=jnp.float32)  # of bfloat16 operands",
)
PATCHES = rewrite(
    "cut the image into patches and multiply, as windows do not overlap: the same sums, at the rate of a matrix "
    "product",
    code="patches = x.reshape(n, h // p, p, w // p, p, c).swapaxes(2, 3).reshape(n, (h // p) * (w // p), p * p * c)\n"
    "y = patches @ kernel.reshape(p * p * c, -1)",
)
MORE_CHANNELS = rewrite(
    "pad the channels of the input and of the filter with zeros to 4 or 8, once where the data is made, or "
    "convolve larger patches (space to depth), so that cuDNN's matrix kernels take it. Padding to 8 took 6 to "
    "20 % less time on an H100 (filters of 3 x 3 and 7 x 7)"
)
LOGSUMEXP = rewrite(
    "write the loss as jax.nn.logsumexp(logits, -1) less the label's logit: the gradient of log_softmax sums its "
    "cotangent over each row, here one-hot, although the sum is known",
    code="picked = jnp.sum(jax.nn.one_hot(labels, logits.shape[-1]) * logits, -1)\n"
    "loss = jax.nn.logsumexp(logits, -1) - picked",
)
LARGER_ITERATIONS = rewrite(
    "do more in each iteration: unroll the loop, so that XLA fuses over several steps, and compute before it what "
    "does not depend on its state (products of the inputs, of all steps at once). One kernel for the whole loop is "
    "best: of an LSTM cuDNN's, jax.experimental.rnn.lstm",
    code="jax.lax.scan(body, state, xs, unroll=4)",
)
FEWER_CALLS = rewrite(
    "return the value and use it after the step, or call for one step of many (jax.lax.cond around the call); "
    "leave jax.debug.print and checkify out of what is timed"
)
