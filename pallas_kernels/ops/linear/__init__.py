"""A linear layer with what follows it: bias, activation, residual."""
