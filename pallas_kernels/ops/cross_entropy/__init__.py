"""Cross-entropy of logits and integer labels: loss and gradient in one pass over the vocabulary."""
