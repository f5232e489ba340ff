"""Rows in groups, each times its group's weights: the products of a mixture of experts, plain and gated."""
