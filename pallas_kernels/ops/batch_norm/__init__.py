"""Batch normalisation in training: statistics over all rows."""
