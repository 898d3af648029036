"""Masks against their definition."""

import pytest
import torch
from oracles import NO_X, SITE, B, D, E, H, S, T, close

from posx import catalog, conformance
from posx.attention import attend, block, choose_path
from posx.build import load_yaml, make_extension, maker
from posx.conformance import Subject
from posx.errors import UserError
from posx.schemes.absolute import Sinusoidal
from posx.schemes.base import Site
from posx.schemes.bias import T5, Alibi
from posx.schemes.contextual import Selective
from posx.schemes.mask import HardAlibi, Window, Windowed, window
from posx.schemes.relative import Shaw
from posx.schemes.rotary import Rope
from posx.schemes.sampling import Shape


@pytest.mark.parametrize("width", [1, 3, 50])
def test_window_counts_the_token_itself(width):
    scheme = Window(SITE, width)
    assert scheme.band == (0, width)
    j = torch.arange(70, 70 + S)
    i = j[-T:]
    mask = scheme.mask(i, j)
    assert mask.shape == (1, T, S)
    for t in range(T):
        seen = [s for s in range(S) if mask[0, t, s] and j[s] <= i[t]]
        row = S - T + t
        assert seen == list(range(max(0, row - width + 1), row + 1))


@pytest.mark.parametrize("make", [Window, lambda site, width: Windowed(site, Rope, width)])
def test_window_refuses_zero(make):
    with pytest.raises(UserError, match="window is 0; it must be at least 1"):
        make(SITE, 0)


# -- heads -----------------------------------------------------------------------------------------


def heads(n: int) -> Site:
    return Site(d_model=8 * n, n_heads=n, d_head=8, train_len=16)


@pytest.mark.parametrize(
    ("n_heads", "keys", "widths"),
    [
        (12, {}, [1, 2, 3, 4, 5, 6, 7, 8, None, None, None, None]),  # the authors' model
        (3, {}, [1, 2, None]),
        (2, {}, [2, None]),  # one masked head would see its own token alone
        (4, {"n_masked": 1, "first": 1}, [1, None, None, None]),
        (4, {"n_masked": 3, "first": 5}, [5, 6, 7, None]),
    ],
)
def test_hard_alibi_head_by_head(n_heads, keys, widths):
    scheme = HardAlibi(heads(n_heads), **keys)
    j = torch.arange(70, 70 + S)
    i = j[-T:]
    mask = scheme.mask(i, j)
    assert mask.shape == (n_heads, T, S)
    for h, width in enumerate(widths):
        for t in range(T):
            row = S - T + t
            seen = [s for s in range(row + 1) if mask[h, t, s]]
            assert seen == list(range(0 if width is None else max(0, row - width + 1), row + 1))


def test_hard_alibi_as_its_authors_build_it():
    """Added to the causal scores of head h < m: 0 on h + 1 diagonals and -inf elsewhere."""
    m, n = 2, 9
    q, k, v = torch.randn(3, B, H, n, D)
    z = (q @ k.transpose(-1, -2)).double() / D**0.5
    z = z.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    for h in range(m):
        hidden = torch.full((n, n), -torch.inf, dtype=torch.float64)
        for offset in range(h + 1):
            hidden.diagonal(-offset).zero_()
        z[:, h] += hidden
    pos = torch.arange(n)
    got = block(HardAlibi(SITE, n_masked=m), q, k, v, pos, pos, None)[1]
    close(got, z.softmax(-1), atol=1e-6)


@pytest.mark.parametrize(
    ("n_heads", "keys", "message"),
    [
        (1, {}, "hard_alibi: n_masked is 1 of 1 heads; at least one head must be masked and one"),
        (3, {"n_masked": 3}, "n_masked is 3 of 3 heads"),
        (3, {"n_masked": 0}, "n_masked is 0 of 3 heads"),
        (3, {"first": 0}, "hard_alibi: first is 0; it must be at least 1"),
    ],
)
def test_hard_alibi_refuses(n_heads, keys, message):
    with pytest.raises(UserError, match=message):
        HardAlibi(heads(n_heads), **keys)


# -- around other schemes --------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [Rope, Alibi, T5, Shaw, lambda site: Window(site, 3)])
@pytest.mark.parametrize("width", [1, 4, 40])
def test_windowed_is_the_inner_scheme_on_the_last_keys(inner, width):
    """Each query attends to the inner scheme's own keys, of which only the last are left."""
    scheme = Windowed(SITE, inner, width)
    n, alone = 23, scheme.over
    x, pos = torch.randn(B, n, E), torch.arange(n)
    q, k, v, state = scheme.prepare(x, *torch.randn(3, B, H, n, D), pos, None)
    got = attend(scheme, q, k, v, pos, pos, state)
    for t in range(n):
        here, last = slice(t, t + 1), slice(max(0, t - width + 1), t + 1)
        want, _ = block(
            alone, q[:, :, here], k[:, :, last], v[:, :, last], pos[here], pos[last], None
        )
        close(got[:, :, here], want.detach(), atol=1e-5)


def test_windowed_skips_keys_unless_the_scores_may_read_them():
    for inner, path in ((Rope, "banded"), (T5, "banded"), (Shaw, "blocks"), (Selective, "blocks")):
        make = inner if inner is not Selective else (lambda site: Selective(site, Rope))
        assert choose_path(Windowed(SITE, make, 8), 2000, 2000, False) == path
    narrow = Windowed(SITE, lambda site: Windowed(site, Shaw, 5), 8)
    assert narrow.band is None


def test_windowed_refuses_positions_that_do_not_count_tokens():
    with pytest.raises(UserError, match="windowed: it counts the visible keys by their positions"):
        Windowed(SITE, lambda site: Shape(site, Sinusoidal))


def test_the_extension_masks_a_copy_of_the_trained_scheme():
    trained = T5(SITE)
    masked = window(trained, 64)
    assert (type(masked), masked.window, masked.band) == (Windowed, 16, (0, 16))
    assert masked.over is not trained
    assert torch.equal(masked.over.weight, trained.weight)
    assert window(trained, 64, window=5).window == 5
    pos = torch.arange(9)
    q = torch.randn(B, H, 9, D)
    assert torch.equal(masked.prepare(NO_X, q, q, q, pos, None)[0], q)


@pytest.mark.parametrize("scheme", ["rope", "selective", "learned"])
def test_extended_schemes_pass_all_checks(scheme):
    extension = make_extension(load_yaml(catalog.find("extension", "window")))
    node = load_yaml(catalog.find("scheme", scheme))
    results = conformance.run(Subject("window", maker(node, extension), "a card"))
    assert [result for result in results if not result.passed] == []
