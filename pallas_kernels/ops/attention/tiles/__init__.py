"""What kernels of both passes do with a tile: bring its rows, mask it, make weights of scores, drop some of them."""
