"""Two linear layers of one input, one of which gates the other: the first half of a gated feed-forward network."""
