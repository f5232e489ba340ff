"""Two linear layers of one input, one gating the other: the first half of a gated feed-forward network."""
