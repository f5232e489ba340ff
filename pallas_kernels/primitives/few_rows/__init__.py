"""Products of a few rows (decoding), where reading the weights once is all that takes time."""
