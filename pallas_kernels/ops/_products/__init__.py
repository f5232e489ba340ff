"""What the operations on matrix products share."""
