"""One folder per operation. The public functions are in `pallas_kernels`; `ops.rms_norm` is the folder."""
