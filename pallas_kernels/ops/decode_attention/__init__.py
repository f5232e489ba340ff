"""Attention of the newest tokens over a long cache of keys and values."""
