"""A scheme around a scheme hands everything on."""

from functools import partial

import pytest
import torch
from oracles import SITE, B, D, E, H, S, close

from posx import conformance
from posx.attention import attend, choose_path
from posx.conformance import Subject
from posx.schemes.absolute import Learned
from posx.schemes.base import HOOKS, Nope
from posx.schemes.bias import T5, Alibi
from posx.schemes.combine import Over
from posx.schemes.mask import Window
from posx.schemes.relative import Shaw
from posx.schemes.rotary import Rope

INNER = (Nope, Rope, Alibi, T5, Shaw, Learned, Window)
TRAITS = ("enters", "shared", "relative", "length_dependent", "kv", "max_len", "band", "reach")


class Around(Over):
    """Another scheme, unchanged: arXiv:0000.00000."""


@pytest.mark.parametrize("inner", INNER)
def test_over_passes_conformance(inner):
    results = conformance.run(Subject("mine", partial(Around, over=inner), "Mine: a test"))
    assert [each for each in results if not each.passed] == []


@pytest.mark.parametrize("inner", INNER)
def test_over_is_the_inner_scheme(inner):
    scheme = Around(SITE, inner)
    alone = scheme.over
    for trait in TRAITS:
        assert getattr(scheme, trait) == getattr(alone, trait)
    for hook in HOOKS:
        assert scheme.overrides(hook) == alone.overrides(hook)
    for training in (False, True):
        paths = [choose_path(each, 2000, 2000, training) for each in (scheme, alone)]
        assert paths[0] == paths[1]
    x, pos = torch.randn(B, S, E), torch.arange(S)
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    outs = []
    for each in (scheme, alone):
        embedded = each.embed(x, pos)
        a, b, c, state = each.prepare(embedded, q, k, v, pos, None)
        outs.append((embedded, attend(each, a, b, c, pos, pos, state)))
    for got, want in zip(*outs, strict=True):
        close(got, want.detach(), 0)


def test_traits_follow_what_an_extension_puts_inside():
    scheme = Around(SITE, Learned)
    scheme.over.max_len = 99
    assert scheme.max_len == 99
    scheme.over = Window(SITE, 7)
    assert (scheme.max_len, scheme.band, scheme.overrides("embed")) == (None, (0, 7), False)


def test_over_over_over():
    scheme = Around(SITE, partial(Around, over=partial(Around, over=Alibi)))
    assert scheme.overrides("distance_bias")
    assert scheme.relative
    d = torch.arange(5)
    close(scheme.distance_bias(d), Alibi(SITE).distance_bias(d), 0)
