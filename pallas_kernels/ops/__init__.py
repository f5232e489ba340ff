"""One folder per operation, or family: `ops.softmax`, `ops.norms`. The public functions are in `pallas_kernels`."""
