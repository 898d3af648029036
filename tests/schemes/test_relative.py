"""Relative vectors against loops over pairs."""

import math

import pytest
import torch
from oracles import SITE, B, D, E, H, S, T, close
from torch.utils._python_dispatch import TorchDispatchMode

from posx.errors import UserError
from posx.schemes.base import Site
from posx.schemes.relative import Shaw


def shaw_by_loops(scheme, q, p, i, j):
    """Added scores (B, H, T, S) and outputs (B, H, T, D), key by key, in float64."""
    keys, values = scheme.keys.detach().double(), scheme.values.detach().double()
    z = torch.zeros(B, H, len(i), len(j), dtype=torch.float64)
    out = torch.zeros(B, H, len(i), D, dtype=torch.float64)
    for t in range(len(i)):
        for s in range(len(j)):
            row = max(-scheme.k, min(scheme.k, int(j[s] - i[t]))) + scheme.k
            z[:, :, t, s] = q[:, :, t].double() @ keys[row] / math.sqrt(D)
            out[:, :, t] += p[:, :, t, s, None].double() * values[row]
    return z, out


@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize("first", [0, 70])
def test_shaw_equals_loops(k, n_queries, first):
    scheme = Shaw(SITE, k=k, init_std=1.0)
    j = torch.arange(first, first + S)
    i = j[-n_queries:]
    visible = j <= i[:, None]  # (T, S)
    q = torch.randn(B, H, n_queries, D)
    z = torch.randn(B, H, n_queries, S)
    p = z.masked_fill(~visible, -torch.inf).softmax(-1)
    added, out = shaw_by_loops(scheme, q, p, i, j)
    got = scheme.scores(z, q, torch.randn(B, H, S, D), i, j, None)
    assert got.isfinite().all()
    # float32 sums of D = 8 products near 1
    close(torch.where(visible, got - z, 0), torch.where(visible, added, 0), atol=5e-6)
    close(scheme.value(p, i, j), out, atol=5e-6)


def test_shaw_rows_and_clipping():
    scheme = Shaw(SITE, k=3)
    assert scheme.keys.shape == scheme.values.shape == (7, D)
    pos = torch.arange(S)
    q = torch.ones(1, 1, S, D)
    last = scheme.scores(torch.zeros(1, 1, S, S), q, q, pos, pos, None)[0, 0, -1]
    far, near = last[: S - 3], last[S - 3 :]  # distances 8 .. 3 and 2, 1, 0
    assert (far == far[0]).all()
    assert len({x.item() for x in (far[0], *near)}) == 4
    wide = Shaw(Site(E, H, 500, 16), k=20, init_std=0.3)
    for table in (wide.keys, wide.values):
        assert table.std().item() == pytest.approx(0.3, rel=0.03)  # 20500 draws: 0.5 %


def test_shaw_gradients_reach_the_rows_that_causality_reads():
    scheme = Shaw(SITE, k=3)
    pos = torch.arange(S)
    q, z = torch.randn(B, H, S, D), torch.zeros(B, H, S, S)
    scores = scheme.scores(z, q, q, pos, pos, None)
    p = scores.masked_fill(pos > pos[:, None], -torch.inf).softmax(-1)
    scheme.value(p, pos, pos).square().sum().backward()
    for table in (scheme.keys, scheme.values):
        used = table.grad.abs().sum(-1) > 0
        assert used.tolist() == [True] * 4 + [False] * 3


def test_shaw_keys_only():
    scheme = Shaw(SITE, k=3, on_values=False)
    assert [n for n, _ in scheme.named_parameters()] == ["keys"]
    assert scheme.value(torch.ones(B, H, T, T), torch.arange(T), torch.arange(T)) is None
    with pytest.raises(UserError, match="k is 0"):
        Shaw(SITE, k=0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_shaw_builds_nothing_larger_than_the_scores():
    n, d_head = 40, 64
    scheme = Shaw(Site(E, H, d_head, 16), k=4)
    pos = torch.arange(n)
    q, z = torch.randn(B, H, n, d_head), torch.zeros(B, H, n, n)
    with Largest() as largest:
        scheme.scores(z, q, q, pos, pos, None)
        scheme.value(z, pos, pos)
    assert z.numel() <= largest.numel <= B * H * n * max(n, d_head) < n * n * d_head
