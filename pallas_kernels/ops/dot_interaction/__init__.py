"""The products of all pairs of feature vectors, as DLRM has them."""
