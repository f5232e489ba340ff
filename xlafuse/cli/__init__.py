"""Command line `xlafuse`, with commands such as `report`, `targets` and `strategies`.

Heavy imports (jax, flax) wait until a command needs them, so that `xlafuse --help` answers at once.
"""

from xlafuse.cli.app import app

__all__ = ["app"]
