"""Fusion strategies on one transformer block: capture, compare, report."""
