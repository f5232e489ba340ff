"""RMSNorm and LayerNorm, with a residual sum and dropout in front: one forward kernel, one backward kernel."""
