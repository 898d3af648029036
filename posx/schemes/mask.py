"""Masks: which earlier keys a query may see. Nothing is added; position is what stays visible.

hooks: mask, and `band`, from which attention knows the keys that it can skip.
"""

from torch import Tensor

from posx.errors import UserError
from posx.schemes.base import Scheme, Site


class Window(Scheme):
    """A query sees its own token and the window - 1 before it: 0 <= i - j < window.

    Beltagy et al. 2020 (arXiv:2004.05150). Inside the window there is no position but the causal
    mask's. No longest length; n layers look back n (window - 1) tokens, whatever the length.
    No parameters, O(T window) time.
    """

    enters = "mask"
    relative = True

    def __init__(self, site: Site, window: int = 32) -> None:
        super().__init__(site)
        if window < 1:
            raise UserError(f"window: window is {window}; it must be at least 1, the token itself")
        self.window = window
        self.band = (0, window)

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        distance = i[..., :, None] - j[..., None, :]  # (T, S) or (B, T, S)
        return distance.unsqueeze(-3) < self.window  # (1, T, S) or (B, 1, T, S)
