"""Flash attention: softmax(query @ key.T + bias) @ value in one launch, and its gradient.

`api` checks the arguments, chooses an implementation and differentiates. `forward` and `backward` have the kernels of
the two passes, each with a `config`. What both do with a tile of scores is in `scores`, `masking` and `dropout`.
"""
