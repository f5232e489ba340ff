"""Bias, activation, dropout and residual sum: what follows a linear layer."""
