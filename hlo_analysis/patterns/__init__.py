"""Patterns that a launch, or a producer and its consumers, match: attention scores, redundant reads, mergeable dots."""
