"""Code that the operations on matrix products share."""
