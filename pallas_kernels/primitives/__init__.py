"""What the kernels share: which device a trace is for, and how a row is cut over a warpgroup."""
