"""Rows in groups, each times its group's gate and up weights: the first half of an expert's MLP."""
