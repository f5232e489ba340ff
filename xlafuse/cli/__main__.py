"""Entry point of `python -m xlafuse.cli`."""

from xlafuse.cli.app import app

app(prog_name="xlafuse")
