"""A linear layer with integer weights."""
