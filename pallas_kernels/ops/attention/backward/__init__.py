"""The backward pass, by one kernel or by two.

`keys` computes dkey and dvalue and, if it is alone, adds up dquery over blocks (`shares`); else `queries` computes
dquery.
"""
