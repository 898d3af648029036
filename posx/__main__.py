"""`python -m posx` is the `posx` command."""

from posx.cli import app

app()
