"""The forward pass: configuration, order of tiles, kernel."""
