"""Flash attention: softmax(query @ key.T + what masks it) @ value in one launch, and its gradient."""
