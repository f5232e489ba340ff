"""Sums or means of table rows: the embedding lookup of recommendation models."""
