"""LayerNorm, with an optional residual sum in front."""
