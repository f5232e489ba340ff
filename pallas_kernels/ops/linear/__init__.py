"""Linear layers with optional bias, activation and residual; after a norm, and in front of one."""
