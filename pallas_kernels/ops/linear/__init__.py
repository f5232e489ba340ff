"""A linear layer with optional bias, activation and residual."""
