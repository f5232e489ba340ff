"""Bias, activation, dropout and residual sum in one operation."""
