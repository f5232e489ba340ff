"""The backward pass: one kernel that makes all gradients, or two that each compute the scores; `config` chooses.

`fused` computes scores once and adds up dquery over blocks; `keys` makes dkey and dvalue, `queries` makes dquery.
"""
