"""Flash attention: softmax(query @ key.T + bias) @ value in one launch, and its gradient.

`api` chooses an implementation and differentiates; `arguments` checks. `problem` has the static facts of a call, and
`few_queries` changes those of calls with few queries. `forward` and `backward` have the kernels of the two passes, each
with a `config` that chooses by `cost`; start at `forward.kernel` and `backward.gradients`. `launch` starts a kernel's
warpgroups in their roles. What both passes do with a tile of scores is in `scores`, `masking` and `dense`; `dropout`
has a generator.
"""
