"""A matrix product with what stands around it, for Hopper's tensor cores."""
