"""Rows of a table by index, and the table's gradient: the lookup of token, type and position embeddings."""
