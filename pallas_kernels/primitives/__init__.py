"""Building blocks of the kernels: target device, rows over warpgroups, matrix products, activations, random bits."""
