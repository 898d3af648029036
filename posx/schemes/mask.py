"""Masks: which earlier keys a query may see. Nothing is added; position is what stays visible.

hooks: mask, and `band`, from which attention knows the keys that it can skip. A mask can also stand
around another scheme (`Windowed`), in training or, as the extension `window`, in evaluation alone.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from posx.errors import UserError
from posx.schemes.base import Maker, Scheme, Site
from posx.schemes.combine import Over
from posx.schemes.relative import distances
from posx.schemes.temperature import check_counts


def check_window(name: str, window: int) -> None:
    """Refuse a window that sees nothing.

    Raises:
        UserError: below 1.
    """
    if window < 1:
        raise UserError(f"{name}: window is {window}; it must be at least 1, the token itself")


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
        check_window("window", window)
        self.window = window
        self.band = (0, window)

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        return distances(i, j) < self.window  # (1, T, S) or (B, 1, T, S)


class HardAlibi(Scheme):
    """Head h = 0, 1, ... of the first n_masked heads sees the last first + h tokens, its own
    included; the other heads see all of them and have no position (NoPE).

    Jelassi et al. 2024 (arXiv:2402.01032), whose code masks 8 of 12 heads from first = 1 on:
    `n_masked` null is two thirds of the heads. The head of first = 1 sees the query's own token
    alone; where only one head is masked (2 heads in all) that would leave no position, so `first`
    null is 2 there and 1 elsewhere. The masked heads together tell the last n-gram, by which the
    others find where it stood before: made for copying. No longest length. No parameters.
    """

    enters = "mask"
    relative = True
    windows: Tensor

    def __init__(self, site: Site, n_masked: int | None = None, first: int | None = None) -> None:
        super().__init__(site)
        n = max(1, round(2 * site.n_heads / 3)) if n_masked is None else n_masked
        if not 0 < n < site.n_heads:
            raise UserError(
                f"hard_alibi: n_masked is {n} of {site.n_heads} heads; at least one head must be "
                "masked and one not, so use model.n_heads=2 or more and scheme.n_masked below it"
            )
        start = (1 if n > 1 else 2) if first is None else first
        if start < 1:
            raise UserError(
                f"hard_alibi: first is {start}; it must be at least 1, the query's own token alone"
            )
        everything = torch.iinfo(torch.long).max
        windows = [start + h if h < n else everything for h in range(site.n_heads)]
        self.register_buffer("windows", torch.tensor(windows), persistent=False)  # (H,)

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        return distances(i, j) < self.windows.view(-1, 1, 1)  # (H, T, S) or (B, H, T, S)


class Windowed(Over):
    """Another scheme whose queries see their own token and the window - 1 before it alone.

    Beltagy et al. 2020 (arXiv:2004.05150), there with absolute positions; with RoPE (window_rope)
    the layers of Jiang et al. 2023 (arXiv:2310.06825, Mistral 7B). A relative scheme then meets no
    distance of `window` or more, at any length; n layers look back n (window - 1) tokens. What else
    the scheme hides stays hidden. No parameters of its own. O(T window) time, but O(T S) around a
    scheme that overrides `scores`: it may read keys there that the window hides, as selective does.
    """

    band: Any = property(lambda w: w.over.band if w.over.overrides("scores") else (0, w.window))

    def __init__(self, site: Site, over: Maker, window: int = 32) -> None:
        super().__init__(site, over)
        check_window("windowed", window)
        check_counts("windowed", self.over)
        self.window = window

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        own, inner = distances(i, j) < self.window, self.over.mask(i, j)
        return own if inner is None else own & inner


def window(scheme: Scheme, length: int, *, window: int | None = None) -> Scheme:
    """Let every query see its last `window` tokens only (None: train_len), see `Windowed`.

    The plain way to keep a trained relative scheme inside the distances that it knows: "window
    attention" in Xiao et al. 2023 (arXiv:2309.17453), which loses the first tokens and with them
    the sink of attention; lm_infinite and sink_window keep them. `length` is not used.
    """
    inner = copy.deepcopy(scheme)
    width = scheme.site.train_len if window is None else window
    return Windowed(scheme.site, lambda site: inner, width)
