"""The backward pass: one kernel for all gradients, or two that each compute the scores; `config` chooses.

`fused` computes scores once and adds up dquery over blocks; `keys` computes dkey and dvalue, `queries` dquery.
"""
