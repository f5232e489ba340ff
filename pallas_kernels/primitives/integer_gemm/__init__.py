"""Products of many rows with integer weights."""
