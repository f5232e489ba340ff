"""A norm and a linear layer in one operation."""
