"""Matrix products with fused epilogues for Hopper's tensor cores."""
