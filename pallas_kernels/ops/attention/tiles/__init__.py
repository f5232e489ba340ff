"""What kernels of both passes do with a tile: bring its rows, make weights of its scores, drop some of them."""
