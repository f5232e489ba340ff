"""One folder an operation. The public functions are in `pallas_kernels`; here `ops.rms_norm` is the folder itself."""
