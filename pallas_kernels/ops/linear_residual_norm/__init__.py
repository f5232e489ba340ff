"""A linear layer added to the residual stream, with the statistics of the norm that follows."""
