"""A linear layer with a low-rank correction beside it."""
