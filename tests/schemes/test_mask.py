"""Masks against their definition."""

import pytest
import torch
from oracles import SITE, S, T

from posx.errors import UserError
from posx.schemes.mask import Window


@pytest.mark.parametrize("window", [1, 3, 50])
def test_window_counts_the_token_itself(window):
    scheme = Window(SITE, window)
    assert scheme.band == (0, window)
    j = torch.arange(70, 70 + S)
    i = j[-T:]
    mask = scheme.mask(i, j)
    assert mask.shape == (1, T, S)
    for t in range(T):
        seen = [s for s in range(S) if mask[0, t, s] and j[s] <= i[t]]
        row = S - T + t
        assert seen == list(range(max(0, row - window + 1), row + 1))


def test_window_refuses_zero():
    with pytest.raises(UserError, match="window is 0"):
        Window(SITE, window=0)
