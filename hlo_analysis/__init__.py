"""Reads what XLA did with a program: launches, fusion decisions, traffic. Knows nothing of the other packages."""
