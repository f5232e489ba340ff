"""Products of few rows, as in decoding, where reading the weights takes nearly all the time."""
