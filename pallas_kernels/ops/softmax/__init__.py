"""Softmax over rows, with an optional scale, mask and causal limit."""
