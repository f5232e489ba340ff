"""Cross-entropy of hidden states and a vocabulary matrix, without the logits in device memory."""
