"""DAPE against loops over queries and keys."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracles import NO_X, SITE, B, D, E, H, S, T, close

from posx import conformance
from posx.attention import choose_path
from posx.conformance import Subject, stirred
from posx.errors import UserError
from posx.schemes import dape
from posx.schemes.base import Nope, Site
from posx.schemes.bias import Alibi, Fire, KerpleLog, alibi_slopes
from posx.schemes.dape import Dape
from posx.schemes.mask import Window
from posx.schemes.relative import Shaw
from posx.schemes.rotary import Rope

# float32 sums of 2H kernel and width products near 1, twice
TOLERANCE = 1e-5


def alibi_bias(i, j):
    """(H, T, S), in float64."""
    slopes = torch.tensor(alibi_slopes(H), dtype=torch.float64)
    return -slopes[:, None, None] * (i[:, None] - j).clamp(min=0)


def by_queries(scheme, z, bias):
    """z + b + f([z; b]) in float64, each query with the keys that it sees alone: (B, H, T, S).

    Convolutions as torch has them, with zeros beyond both ends of what is visible. Keys after the
    query are left at 0. bias: (H, T, S) or None.
    """
    z = z.double()
    n_queries, n_keys = z.shape[-2:]
    out = torch.zeros_like(z)
    pad = scheme.kernel // 2
    for t in range(n_queries):
        seen = n_keys - n_queries + t + 1
        row = z[:, :, t, :seen]  # (B, H, keys)
        both, total = row, row
        if bias is not None:
            b = bias[:, t, :seen].expand_as(row)
            both, total = torch.cat([row, b], 1), row + b
        for layer in (scheme.hidden, scheme.out):
            weight, shift = layer.weight[:, :, 0].double(), layer.bias.double()
            both = F.conv1d(both, weight, shift, padding=pad)
            if layer is scheme.hidden:
                both = torch.where(both > 0, both, 0.01 * both)
        out[:, :, t, :seen] = total + both
    return out.detach()


def added(scheme, z, i, j):
    """The scores of visible keys, others at 0."""
    q, k = torch.randn(B, H, len(i), D), torch.randn(B, H, len(j), D)
    got = scheme.scores(z, q, k, i, j, None)
    assert got.isfinite().all()
    return torch.where(j <= i[:, None], got, 0)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize("first", [0, 70])
def test_dape_equals_loops(kernel, n_queries, first):
    scheme = stirred(Dape(SITE, Alibi, kernel=kernel, width=7))
    j = torch.arange(first, first + S)
    i = j[-n_queries:]
    z = torch.randn(B, H, n_queries, S)
    close(added(scheme, z, i, j), by_queries(scheme, z, alibi_bias(i, j)), atol=TOLERANCE)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("n_keys", [1, 2])
def test_dape_of_the_first_tokens(kernel, n_keys):
    scheme = stirred(Dape(SITE, Alibi, kernel=kernel))
    j = torch.arange(n_keys)
    z = torch.randn(B, H, n_keys, n_keys)
    close(added(scheme, z, j, j), by_queries(scheme, z, alibi_bias(j, j)), atol=TOLERANCE)


def test_dape_is_an_mlp_of_each_pair():
    """The paper's form: two linear layers over the 2H numbers, as torch has them."""
    scheme = Dape(SITE, Alibi)
    hidden, out = torch.nn.Linear(2 * H, 32), torch.nn.Linear(32, H)
    for layer, own in ((hidden, scheme.hidden), (out, scheme.out)):
        layer.load_state_dict({"weight": own.weight[:, :, 0, 0], "bias": own.bias})
    mlp = torch.nn.Sequential(hidden, torch.nn.LeakyReLU(), out)
    j = torch.arange(S)
    z = torch.randn(B, H, S, S)
    bias = alibi_bias(j, j).float().expand(B, -1, -1, -1)
    want = z + bias + mlp(torch.cat([z, bias], 1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    close(added(scheme, z, j, j), want.tril().detach(), atol=TOLERANCE)


@pytest.mark.parametrize("inner", [Nope, Rope])
@pytest.mark.parametrize("kernel", [1, 3])
def test_dape_without_a_bias_reads_the_scores_alone(inner, kernel):
    scheme = stirred(Dape(SITE, inner, kernel=kernel))
    assert scheme.hidden.in_channels == H
    j = torch.arange(S)
    z = torch.randn(B, H, S, S)
    close(added(scheme, z, j, j), by_queries(scheme, z, None), atol=TOLERANCE)


@pytest.mark.parametrize("kernel", [1, 3])
def test_dape_over_scores(kernel):
    """A bias that depends on the query's position, which no distance_bias can be."""
    scheme = stirred(Dape(SITE, Fire, kernel=kernel))
    j = torch.arange(20, 20 + S)
    i = j[-T:]
    z = torch.randn(B, H, T, S)
    bias = scheme.over.scores(torch.zeros_like(z), NO_X, NO_X, i, j, None)[0].double()
    close(added(scheme, z, i, j), by_queries(scheme, z, bias), atol=TOLERANCE)


def test_dape_takes_positions_of_each_sequence():
    scheme = stirred(Dape(SITE, Alibi, kernel=3))
    j = torch.stack([torch.arange(S) * 3, torch.arange(S) + 40])  # (B, S)
    z = torch.randn(B, H, T, S)
    got = scheme.scores(z, NO_X, NO_X, j[:, -T:], j, None)
    for b in range(B):
        want = by_queries(scheme, z, alibi_bias(j[b, -T:], j[b]))[b]
        close(got[b].tril(S - T), want, atol=TOLERANCE)


@pytest.mark.parametrize("kernel", [1, 3])
def test_dape_in_chunks_is_the_same(kernel, monkeypatch):
    scheme = stirred(Dape(SITE, Alibi, kernel=kernel))
    j = torch.arange(S)
    z = torch.randn(B, H, T, S)
    want = added(scheme, z, j[-T:], j)
    for rows in (0, 2, 3):
        monkeypatch.setattr(dape, "CHUNK_BYTES", rows * 4 * B * 32 * S)
        close(added(scheme, z, j[-T:], j), want, atol=TOLERANCE)  # other shapes, other kernels


def test_dape_parameters_are_as_many_as_documented():
    for kernel, width in ((1, 32), (3, 5)):
        scheme = Dape(SITE, KerpleLog, kernel=kernel, width=width)
        own = 2 * H * kernel * width + width + width * kernel * H + H
        assert sum(p.numel() for p in scheme.parameters()) == own + 2 * H
        assert not scheme.shared  # although KERPLE alone is


def test_no_path_adds_the_inner_bias_again():
    scheme = Dape(SITE, Alibi)
    for training in (False, True):
        assert choose_path(scheme, S, S, training) == "dense"
        assert choose_path(scheme, 2000, 2000, training) == "blocks"
    assert choose_path(Dape(SITE, Window), 2000, 2000, False) == "blocks"  # not banded


@pytest.mark.parametrize(
    ("inner", "kernel"),
    [(Fire, 3), (Shaw, 1), (partial(Window, window=4), 3)],
)
def test_dape_passes_conformance_over(inner, kernel):
    make = partial(Dape, over=inner, kernel=kernel)
    results = conformance.run(Subject("mine", make, "Mine: a scheme of a test"))
    assert [f"{each.check}: {each.message}" for each in results if not each.passed] == []


def test_dape_refuses_what_cannot_be():
    for kernel in (0, 2):
        with pytest.raises(UserError, match=f"kernel is {kernel}; it must be odd"):
            Dape(SITE, Alibi, kernel=kernel)
    with pytest.raises(UserError, match="width is 0"):
        Dape(SITE, Alibi, width=0)


def test_hidden_units_of_a_long_block_stay_small(monkeypatch):
    """All at once, 128 queries of 8192 keys would take 128 MiB of hidden units."""
    scheme, sizes = Dape(Site(E, 2, D, 16), Alibi, kernel=3), []
    leaky = F.leaky_relu_
    monkeypatch.setattr(F, "leaky_relu_", lambda x: sizes.append(x.numel() * 4) or leaky(x))
    j = torch.arange(8192)
    with torch.no_grad():
        scheme.scores(torch.zeros(1, 2, 9, 8192), NO_X, NO_X, j[-9:], j, None)
    assert len(sizes) > 1
    assert max(sizes) <= dape.CHUNK_BYTES
