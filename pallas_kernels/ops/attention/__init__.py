"""Flash attention: softmax(query @ key.T + bias) @ value in one launch, and its gradient.

`api` checks, chooses an implementation and differentiates; `forward` and `backward` have the kernels of the two passes,
each with a `config` that chooses how a problem is cut. What both passes do with a tile of scores is in `scores`,
`masking`, `dropout` and `row_tiles`.
"""
