"""posx: an experiment runner for length extrapolation of positional encodings."""
