"""Flash attention: softmax(query @ key.T + what masks it) @ value in one launch, and its gradient.

`api` checks, chooses and differentiates; `mosaic_gpu` launches the kernel of `forward`, `mosaic_gpu_vjp` those of
`backward`; `tiles` has what kernels of both passes do with a tile of scores.
"""
