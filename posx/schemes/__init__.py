"""Positional schemes, one family a file; configs/scheme names them."""
