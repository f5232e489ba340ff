"""Measuring on a GPU: timing, environment, and the kernel benchmark."""
