"""Fused transformer operations for JAX on NVIDIA GPUs."""
