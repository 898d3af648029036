"""Hydra's launcher for `posx train -m` on one machine; Hydra finds launchers only here."""
