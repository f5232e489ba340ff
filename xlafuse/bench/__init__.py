"""Benchmarks on a GPU: timing, environment, and the kernel, block, model and choice benchmarks."""
