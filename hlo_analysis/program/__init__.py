"""Launches of a program: one row a launch, the values between them, and how much of each a launch computes."""
