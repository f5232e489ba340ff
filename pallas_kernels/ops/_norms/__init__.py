"""The kernels that `rms_norm`, `layer_norm` and `dropout_residual_norm` share: one forward pass, one backward pass."""
