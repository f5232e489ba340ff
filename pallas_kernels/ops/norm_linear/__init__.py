"""A linear layer of a normalised input."""
