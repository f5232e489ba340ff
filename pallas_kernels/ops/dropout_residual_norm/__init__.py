"""Dropout, residual sum and norm."""
