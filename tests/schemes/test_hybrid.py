"""Hybrids: which scheme acts where, against each scheme alone; the sink against published code."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from oracles import NO_X, SITE, B, D, E, H, S, T, close
from torch import nn

from posx import build, catalog, conformance
from posx.attention import attend, choose_path
from posx.conformance import Subject
from posx.errors import UserError
from posx.schemes.absolute import Learned
from posx.schemes.base import Nope, Scheme, Site
from posx.schemes.bias import T5, Alibi
from posx.schemes.hybrid import AttnSink, Heads, Layers, LinearAlibi
from posx.schemes.mask import Window
from posx.schemes.relative import Shaw
from posx.schemes.rotary import Rope
from posx.schemes.temperature import AdaptiveScale, Entmax, Llama4

FIRST = 1  # of H = 3 heads
CLOSE = 3e-6  # float32, the same sums in another order


class Gates(Scheme):
    """Keys weigh by a running sum of their inputs: a state of two axes a token, and a fold."""

    def prepare(self, x, q, k, v, pos, past):
        total = x[..., : 2 * self.site.n_heads].unflatten(-1, (self.site.n_heads, 2))
        return q, k, v, total  # (B, T, H, 2)

    def scores(self, z, q, k, i, j, state):
        return z + self.bias(state)

    def fold(self, pos, state):
        key = self.bias(state).transpose(-1, -2) * self.site.d_head**0.5
        return torch.ones_like(key), key

    def bias(self, state):
        return state.sum(-1).transpose(1, 2)[:, :, None]  # (B, H, 1, S)


class Marks(Scheme):
    """Hides keys by a whole number that each token carries, of one axis."""

    def prepare(self, x, q, k, v, pos, past):
        return q, k, v, (x[..., 0] > 0).long() + 2**40

    def scores(self, z, q, k, i, j, state):
        assert state.dtype == torch.int64
        return z - 3 * (state - 2**40)[:, None, None].to(z)


def failures(make):
    results = conformance.run(Subject("mine", make, "Mine: a scheme of a test"))
    return [f"{each.check}: {each.message}" for each in results if not each.passed]


def load(name, site=SITE):
    return build.make_scheme(build.load_yaml(catalog.find("scheme", name)), site)


def test_layers_pick_every_fourth():
    site = Site(E, H, D, 16, n_layers=9)
    kinds = [type(Layers(site.at(n), Rope, Nope).over) for n in range(9)]
    assert [n for n, kind in enumerate(kinds) if kind is Nope] == [3, 7]
    assert all(type(Layers(site.at(n), Rope, Nope, every=1).over) is Nope for n in range(3))


def test_layers_are_those_of_llama4_smollm3_and_cohere2():
    transformers = pytest.importorskip("transformers")
    n = 8
    ours = [type(Layers(SITE.at(layer), Rope, Nope).over) is Rope for layer in range(n)]
    llama = transformers.Llama4TextConfig(num_hidden_layers=n)
    assert [bool(rope) for rope in llama.no_rope_layers] == ours
    smollm = transformers.SmolLM3Config(num_hidden_layers=n)
    assert [bool(rope) for rope in smollm.no_rope_layers] == ours
    cohere = transformers.Cohere2Config(num_hidden_layers=n)
    assert [kind == "sliding_attention" for kind in cohere.layer_types] == ours


def test_irope_has_a_temperature_in_the_layer_without_rope():
    kinds = [type(load("irope", SITE.at(layer)).over) for layer in range(4)]
    assert kinds == [Rope, Rope, Rope, Llama4]
    assert isinstance(load("irope", SITE.at(3)).over.over, Nope)


def test_layers_take_the_traits_of_their_scheme_but_are_not_shared():
    layers = Layers(SITE, Window, T5, every=2)
    assert (layers.band, layers.enters) == ((0, 32), "mask")
    other = Layers(SITE.at(1), Window, T5, every=2)
    assert T5.shared
    assert not other.shared
    assert other.overrides("distance_bias")
    assert not other.overrides("mask")


@pytest.mark.parametrize("inner", [Alibi, T5, Shaw, Window])
def test_layers_pass_conformance(inner):
    """The second of two layers is that of `inner`."""
    assert failures(partial(Layers, most=Rope, other=inner, every=2)) == []


def heads(first, second, site=SITE):
    scheme = Heads(site, first, second, FIRST)
    conformance.stirred(scheme)
    return scheme


def layer_by_heads(scheme, x, q, k, v, pos):
    """The two groups of heads as two layers of their own."""
    outs = []
    for part, own in ((scheme.first, slice(0, FIRST)), (scheme.second, slice(FIRST, H))):
        a, b, c, state = part.prepare(x, q[:, own], k[:, own], v[:, own], pos, None)
        outs.append(attend(part, a[:, :, -T:], b, c, pos[-T:], pos, state))
    return torch.cat(outs, 1)


PAIRS = [
    (Alibi, Nope),
    (Alibi, Rope),
    (T5, Shaw),
    (Shaw, Window),
    (Window, Window),
    (Gates, Alibi),
    (Gates, Marks),
    (Marks, Gates),
    (Rope, Marks),
    (partial(AttnSink, over=Alibi), partial(Entmax, over=Rope)),
    (Nope, Rope),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("training", [False, True])
def test_heads_equal_each_scheme_alone(first, second, training):
    scheme = heads(first, second)
    x, pos = torch.randn(B, S, E), torch.arange(S)
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    with torch.set_grad_enabled(training):
        want = layer_by_heads(scheme, x, q, k, v, pos)
        a, b, c, state = scheme.prepare(x, q, k, v, pos, None)
        got = attend(scheme, a[:, :, -T:], b, c, pos[-T:], pos, state)
    close(got, want.detach(), CLOSE)


@pytest.mark.parametrize(("first", "second"), PAIRS[:3] + PAIRS[5:7])
def test_heads_pass_conformance(first, second):
    assert failures(lambda site: Heads(site, first, second, FIRST)) == []


def test_heads_keep_the_states_apart():
    scheme = heads(Gates, Marks)
    x = torch.randn(B, S, E)
    q = torch.randn(B, H, S, D)
    pos = torch.arange(S)
    state = scheme.prepare(x, q, q, q, pos, None)[3]
    assert state.shape == (B, S, 2 * FIRST + 1)

    class Past(Gates):
        def prepare(self, x, q, k, v, pos, past):
            self.past = past
            return super().prepare(x, q, k, v, pos, past)

    scheme.first = Past(replace(SITE, n_heads=FIRST))
    scheme.prepare(x, q, q, q, pos, state)
    assert torch.equal(scheme.first.past, x[..., : 2 * FIRST].unflatten(-1, (FIRST, 2)))


def test_heads_have_the_hooks_that_either_has():
    def hooks(first, second):
        scheme = Heads(SITE, first, second, FIRST)
        return {hook for hook in ("scores", "mask", "value", "fold", "distance_bias")
                if scheme.overrides(hook)}  # fmt: skip

    assert hooks(Rope, Nope) == set()
    assert hooks(Alibi, Rope) == {"distance_bias", "fold"}
    assert hooks(Alibi, T5) == {"distance_bias"}  # t5 has no fold
    assert hooks(Gates, Alibi) == {"distance_bias", "scores", "fold"}
    assert hooks(Shaw, Window) == {"scores", "value", "mask"}
    assert choose_path(Heads(SITE, Alibi, Nope), 2000, 2000, True) == "folded"
    assert choose_path(Heads(SITE, Alibi, Nope), 2000, 2000, False) == "strips"
    assert choose_path(Heads(SITE, Rope, Nope), 2000, 2000, True) == "sdpa"


def test_heads_have_the_traits_of_both():
    wide = partial(Window, window=50)
    assert Heads(SITE, Window, wide).band == (0, 50)
    assert Heads(SITE, Window, Rope).band is None
    assert Heads(SITE, Rope, Alibi).relative
    assert not Heads(SITE, Rope, Nope).relative
    assert (Heads(SITE, Nope, Rope).enters, Heads(SITE, Nope, Window).enters) == ("q/k", "mask")
    assert Heads(SITE, T5, T5).shared
    assert not Heads(SITE, T5, Shaw).shared
    short = Heads(SITE, Rope, Nope)
    short.second.max_len, short.first.length_dependent, short.first.kv = 40, True, False
    assert (short.max_len, short.length_dependent, short.kv) == (40, True, False)


def test_heads_build_each_scheme_for_its_own_heads():
    for n_heads, split in ((2, (1, 1)), (3, (1, 2)), (8, (4, 4))):
        scheme = Heads(Site(E, n_heads, D, 16), Alibi, Nope)
        assert (scheme.first.site.n_heads, scheme.second.site.n_heads) == split
        assert len(scheme.first.slopes) == split[0]


def test_nape_slopes():
    """1 / h in the ALiBi half, none in the other, as in the authors' code."""
    scheme = load("nape", Site(E, 8, D, 16))
    d = torch.arange(S)
    want = -torch.tensor([1, 1 / 2, 1 / 3, 1 / 4, 0, 0, 0, 0], dtype=torch.float64)[:, None] * d
    close(scheme.distance_bias(d), want, 5e-7)
    assert LinearAlibi(SITE).bfloat16().slopes.dtype == torch.float32


def test_asentmax_scales_the_nope_heads_alone():
    scheme = load("asentmax", Site(E, 4, D, 16))
    nape = scheme.over
    assert isinstance(scheme, Entmax)
    assert isinstance(nape.first, LinearAlibi)
    assert isinstance(nape.second, AdaptiveScale)
    q = torch.randn(B, 4, S, D)
    after = scheme.prepare(torch.randn(B, S, E), q, q, q, torch.arange(S), None)[0]
    assert torch.equal(after[:, :2], q[:, :2])
    assert not torch.isclose(after[:, 2:], q[:, 2:]).any()
    assert sum(p.numel() for p in scheme.parameters()) == 2 * (E + 1) * 2


def test_what_acts_before_the_layers_is_refused():
    class Drawn(Scheme):
        def positions(self, symbols, offset, generator):
            return super().positions(symbols, offset, generator)

    with pytest.raises(UserError, match=r"layers: Learned changes the embeddings of the whole"):
        Layers(SITE, Learned, Nope)
    with pytest.raises(UserError, match=r"layers: Drawn gives the positions .* to some layers"):
        Layers(SITE.at(3), Nope, Drawn)
    for pair in ((Learned, Nope), (Nope, Learned)):
        with pytest.raises(UserError, match=r"heads: Learned changes .* to some heads"):
            Heads(SITE, *pair)


def test_bad_parameters_are_refused():
    with pytest.raises(UserError, match="every is 0; it must be at least 1"):
        Layers(SITE, Rope, Nope, every=0)
    for n_first in (0, H, -1):
        with pytest.raises(UserError, match=f"n_first is {n_first} of 3 heads"):
            Heads(SITE, Rope, Nope, n_first)
    with pytest.raises(UserError, match="n_first is 0 of 1 heads"):
        Heads(Site(E, 1, D, 16), Rope, Nope)


def test_an_extension_reaches_the_scheme_inside():
    yarn = build.make_extension(build.load_yaml(catalog.find("extension", "yarn")))
    before = Heads(SITE, partial(AttnSink, over=Rope), Nope, FIRST)
    after = yarn(before, 64)
    assert after.first.over.attention_factor > 1
    assert before.first.over.attention_factor == 1
    layers = yarn(Layers(SITE, Rope, Nope), 64)
    assert layers.over.attention_factor > 1


def sink_of(scheme, values):
    with torch.no_grad():
        scheme.sink.copy_(torch.tensor(values))
    return scheme


def test_attn_sink_equals_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    sinks = [0.5, -1.0, 2.0]
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    module = SimpleNamespace(
        sinks=nn.Parameter(torch.tensor(sinks)), num_key_value_groups=1, training=False
    )
    hidden = torch.full((S, S), -torch.inf).triu(1)
    want, _ = gpt_oss.eager_attention_forward(module, q, k, v, hidden, D**-0.5)
    pos = torch.arange(S)
    got = attend(sink_of(AttnSink(SITE, Nope), sinks), q, k, v, pos, pos, None)
    close(got, want.transpose(1, 2).detach(), CLOSE)


def test_attn_sink_equals_x_transformers(oracle):
    from x_transformers.attend import Attend

    sinks = [0.5, -1.0, 2.0]
    attention = Attend(heads=H, causal=True, head_learned_sink=True)
    with torch.no_grad():
        attention.head_attn_sink.copy_(torch.tensor(sinks))
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    want = attention(q, k, v)[0]
    pos = torch.arange(S)
    got = attend(sink_of(AttnSink(SITE, Nope), sinks), q, k, v, pos, pos, None)
    close(got, want.detach(), CLOSE)


def test_attn_sink_takes_weight_and_starts_at_init():
    z = torch.randn(B, H, T, S)
    p = AttnSink(SITE, Nope).normalize(z)
    close(p, z.double().exp() / (1 + z.double().exp().sum(-1, keepdim=True)), 1e-6)
    low = AttnSink(SITE, Nope, init=-200.0).normalize(z)
    close(low, z.double().softmax(-1), 1e-6)
    half = copy.deepcopy(AttnSink(SITE, Nope)).bfloat16()
    assert half.normalize(z.bfloat16()).dtype == torch.float32
    assert AttnSink(SITE, Window).band == (0, 32)
    assert sum(each.numel() for each in AttnSink(SITE, Window).parameters()) == H


def test_heads_without_a_state_have_none():
    q = torch.randn(B, H, S, D)
    assert Heads(SITE, Rope, Nope).prepare(NO_X, q, q, q, torch.arange(S), None)[3] is None
