"""Distance maps of a trained RoPE or ALiBi, against n x n matrices of their formulas in float64."""

import math

import pytest
import torch
from oracles import NO_X, SITE, B, D, H, close

from posx import catalog, conformance
from posx.attention import block
from posx.build import load_yaml, make_extension, maker
from posx.conformance import Subject, layer
from posx.errors import UserError
from posx.schemes.bias import Alibi, AlibiLearned
from posx.schemes.distance import (
    dca,
    leaky_rerope,
    lm_infinite,
    rerope,
    self_extend,
    sink_window,
    string,
)  # fmt: skip
from posx.schemes.rotary import Rope
from posx.schemes.rotary_variants import PRope
from posx.schemes.sampling import Abacus
from posx.schemes.scaling import dynamic, yarn

L, N, LAST = 16, 53, 11  # training length (that of SITE), tokens, queries of a block
NAMES = ("rerope", "leaky_rerope", "self_extend", "dca", "string", "lm_infinite", "sink_window")


# -- the maps, one pair of positions at a time; None: the key is hidden ---------------------------


def leaky(w, k):
    return lambda i, j: i - j if i - j < w else w + (i - j - w) / k


def rectified(w):
    return lambda i, j: min(i - j, w)


def grouped(w, g, shift):
    return lambda i, j: i - j if i - j < w else i // g + shift - j // g


def chunked(s, c):
    """The three lists of query positions of the paper's section 3, for a pretraining window of c
    tokens; the local window is w = c - s."""
    own = list(range(s))
    after = [s + t if t < c - s else c - 1 for t in range(s)]

    def distance(i, j):
        apart = i // s - j // s
        query = own[i % s] if apart == 0 else after[i % s] if apart == 1 else c - 1
        return query - j % s

    return distance


def shifted(s, w):
    return lambda i, j: i - j if i - j < s else i - j - s + w


def lambda_shaped(g, w):
    return lambda i, j: i - j if i - j < w else w if j < g else None


def streamed(sinks, window):
    """Places in a cache that is fed token by token and drops what lies between."""
    caches, cache = [], []
    for token in range(N):
        cache = [*cache, token]
        if len(cache) > sinks + window:
            cache = [*cache[:sinks], *cache[sinks + 1 :]]
        caches.append(cache)

    def distance(i, j):
        return caches[i].index(i) - caches[i].index(j) if j in caches[i] else None

    return distance


# Defaults at a training length of 16 and 64 tokens, then parameters of all kinds.
CASES = {
    "rerope": (rerope, {}, rectified(4)),
    "rerope, wide": (rerope, {"window": 9}, rectified(9)),
    "leaky": (leaky_rerope, {}, leaky(4, 60 / 12)),
    "leaky, as coded": (leaky_rerope, {"window": 2, "factor": 16.0}, leaky(2, 16)),
    "grouped": (self_extend, {}, grouped(4, 5, 4 - 0)),
    "grouped, floor": (self_extend, {"window": 7, "group": 3}, grouped(7, 3, 7 - 2)),
    "grouped, exact": (
        self_extend, {"window": 7, "group": 3, "exact": True}, grouped(7, 3, 7 - 7 / 3),
    ),
    "chunked": (dca, {}, chunked(12, 16)),
    "chunked, figure 2": (dca, {"chunk": 6, "limit": 9}, chunked(6, 10)),
    "chunked, as coded": (dca, {"chunk": 10, "limit": 12}, chunked(10, 13)),
    "shifted": (string, {}, shifted(5, 1)),
    "shifted, wide": (string, {"shift": 13, "local": 6}, shifted(13, 6)),
    "lambda": (lm_infinite, {}, lambda_shaped(10, 16)),
    "lambda, no sinks": (lm_infinite, {"sinks": 0, "window": 5}, lambda_shaped(0, 5)),
    "stream": (sink_window, {}, streamed(4, 12)),
    "stream, small": (sink_window, {"sinks": 2, "window": 5}, streamed(2, 5)),
}  # fmt: skip


def matrix(distance):
    """D' of every pair, 0 where the key comes later or is hidden, and which keys are seen."""
    pairs = [[distance(i, j) if j <= i else None for j in range(N)] for i in range(N)]
    seen = torch.tensor([[d is not None for d in row] for row in pairs])
    return torch.tensor([[d or 0 for d in row] for row in pairs], dtype=torch.float64), seen


def rotary_scores(scheme: Rope, q, k, distances):
    """q^T R(D') k / sqrt(D), a pair of dimensions as one complex number, pair by pair."""
    q, k, width = q.double(), k.double(), scheme.rotary_dim
    z = q[..., width:] @ k[..., width:].transpose(-1, -2)
    for c in range(width // 2):
        a, b = (2 * c, 2 * c + 1) if scheme.interleaved else (c, c + width // 2)
        query, key = (torch.complex(x[..., a], x[..., b]) for x in (q, k))
        turn = torch.exp(1j * distances * scheme.inv_freq[c].double())
        z += scheme.attention_factor**2 * (query[..., None] * key[..., None, :].conj() * turn).real
    return z / D**0.5


def some(n=N):
    return torch.randn(2, B, H, n, D)


TRAINED = {
    "rope": lambda: Rope(SITE),
    "partial, interleaved": lambda: Rope(SITE, base=50.0, rotary_dim=6, interleaved=True),
    "yarn": lambda: yarn(Rope(SITE), 64),
    "p_rope": lambda: PRope(SITE, p=0.5),
}


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize(("extend", "keys", "distance"), CASES.values(), ids=CASES)
def test_scores_are_those_of_the_mapped_distance(extend, keys, distance, trained):
    scheme = trained()
    mapped = extend(scheme, 64, **keys)
    q, k = some()
    pos = torch.arange(N)
    raw_q, raw_k, _, state = mapped.prepare(NO_X, q, k, k, pos, None)
    assert state is None
    assert torch.equal(raw_k, k)  # what is cached
    z = (raw_q[:, :, -LAST:] @ raw_k.transpose(-1, -2)) / D**0.5
    got = mapped.scores(z, raw_q[:, :, -LAST:], raw_k, pos[-LAST:], pos, None)
    assert got.shape == (B, H, LAST, N)
    wanted, seen = matrix(distance)
    want = rotary_scores(scheme, q, k, wanted)[:, :, -LAST:]
    # float32 angles of up to 53 rad, off by 4e-6, times scores of up to 10
    close(got.masked_fill(~seen[-LAST:], 0), want.masked_fill(~seen[-LAST:], 0), atol=4e-5)


def test_the_figure_of_dual_chunk_attention():
    """Chunks of 6, a pretraining window of 10: no distance above 9, neighbours across a border."""
    wanted, _ = matrix(chunked(6, 10))
    assert wanted.max() == 9
    assert wanted[11, :12].tolist() == [9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0]
    assert wanted[6, :7].tolist() == [6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("case", ["lambda", "lambda, no sinks", "stream", "stream, small"])
@pytest.mark.parametrize("trained", [Rope, Alibi])
def test_hidden_keys(case, trained):
    extend, keys, distance = CASES[case]
    mapped = extend(trained(SITE), 64, **keys)
    pos = torch.arange(N)
    _, seen = matrix(distance)
    mask = mapped.mask(pos, pos)
    assert mask.shape == (1, N, N)
    assert torch.equal(mask[0] & torch.ones(N, N, dtype=torch.bool).tril(), seen)
    assert mapped.band == (mapped.sinks, mapped.window)


@pytest.mark.parametrize("case", ["lambda", "lambda, no sinks", "stream", "stream, small"])
@pytest.mark.parametrize("trained", [Alibi, AlibiLearned])
def test_alibi_has_the_bias_of_the_mapped_distance(case, trained):
    extend, keys, distance = CASES[case]
    scheme = trained(SITE)
    mapped = extend(scheme, 64, **keys)
    q, k = some()
    pos = torch.arange(N)
    z = q @ k.transpose(-1, -2)
    got = mapped.scores(z[:, :, -LAST:], q[:, :, -LAST:], k, pos[-LAST:], pos, None)
    wanted, seen = matrix(distance)
    slopes = torch.tensor([1 / 16, 1 / 256, 1 / 4], dtype=torch.float64)  # of 3 heads
    want = (z.double() - slopes[:, None, None] * wanted)[:, :, -LAST:]
    close(got.masked_fill(~seen[-LAST:], 0), want.masked_fill(~seen[-LAST:], 0), atol=1e-5)


def test_positions_of_every_sequence():
    """(B, T), as a scheme around it may draw them: each row has its own distances."""
    pos = torch.stack([torch.arange(N), torch.arange(N) * 2])
    q, k = some()
    z = q @ k.transpose(-1, -2) / D**0.5
    for extend, trained in ((self_extend, Rope), (dca, Rope), (lm_infinite, Alibi)):
        mapped = extend(trained(SITE), 64)
        got = mapped.scores(z, q, k, pos, pos, None)
        for row in range(B):
            alone = mapped.scores(
                z[row, None], q[row, None], k[row, None], pos[row], pos[row], None
            )
            close(got[row, None], alone.detach(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "trained", "length"),
    [
        ("leaky_rerope", Rope, L), ("self_extend", Rope, L), ("dca", Rope, 64),
        ("lm_infinite", Rope, 64), ("lm_infinite", Alibi, 64), ("sink_window", Rope, 64),
        ("sink_window", Alibi, 64),
    ],
)  # fmt: skip
def test_nothing_changes_within_the_training_length(name, trained, length):
    extension = make_extension(load_yaml(catalog.find("extension", name)))
    outs = []
    for scheme in (trained(SITE), extension(trained(SITE), length)):
        given = layer(scheme, L)
        outs.append(block(*given[:4], given.pos, given.pos, given.state)[0])
    close(outs[1], outs[0].detach(), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_trained_scheme_is_left_alone(name):
    extension = make_extension(load_yaml(catalog.find("extension", name)))
    trained = Rope(SITE)
    mapped = extension(trained, 64)
    mapped.trained.inv_freq += 1
    mapped.trained.attention_factor = 2.0
    assert torch.equal(trained.inv_freq, Rope(SITE).inv_freq)
    assert trained.attention_factor == 1.0
    assert (mapped.kv, mapped.length_dependent, mapped.enters) == (True, False, "q/k")


def test_dca_sharpens_as_its_code():
    scheme = yarn(Rope(SITE), 64)
    temperature = (0.05 * math.log(4) + 1) ** 2
    q, k = some(5)
    pos, z = torch.arange(5), torch.zeros(B, H, 5, 5)
    plain, sharp = (
        dca(scheme, 64, sharpen=on).scores(z, q, k, pos, pos, None) for on in (False, True)
    )
    close(sharp, plain.double() * temperature, atol=1e-5)
    unchanged = dca(scheme, 7, sharpen=True).scores(z, q, k, pos, pos, None)
    assert torch.equal(unchanged, plain)


def test_rerope_scales_queries_as_its_code():
    for extend in (rerope, leaky_rerope):
        q, k = some()
        pos = torch.arange(N)
        plain = extend(Rope(SITE), 64).prepare(NO_X, q, k, k, pos, None)[0]
        scaled = extend(Rope(SITE), 64, logn=True).prepare(NO_X, q, k, k, pos, None)[0]
        factor = torch.tensor([max(1.0, math.log(n) / math.log(L)) for n in range(1, N + 1)])
        close(scaled, plain.double() * factor[:, None].double(), atol=1e-5)


def test_self_extend_fits_the_length():
    """The smallest group whose farthest distance was trained on, up to a rounding of one group."""
    for length in (16, 17, 40, 64, 200):
        group = self_extend(Rope(SITE), length).group
        assert (L - 4) * group + 4 >= length
        assert group == 1 or (L - 4) * (group - 1) + 4 < length


def test_angles_stay_float32_in_half_precision():
    mapped = rerope(Rope(SITE), 64, window=9)
    q, k = some()
    pos = torch.arange(4000, 4000 + N)
    want = mapped.scores(q @ k.transpose(-1, -2), q, k, pos, pos, None)
    half = mapped.to(torch.bfloat16)
    q, k = q.bfloat16(), k.bfloat16()
    got = half.scores(q @ k.transpose(-1, -2), q, k, pos, pos, None)
    assert got.dtype == torch.bfloat16
    close(got, want, atol=0.15)  # 8 bits of scores of up to 10; bfloat16 positions step by 16 here


class OwnTurn(Rope):
    """A variant with a rule of its own."""

    def prepare(self, x, q, k, v, pos, past):
        return super().prepare(x, q, k, v, pos + 1, past)


class OwnBias(Alibi):
    """A variant with a rule of its own."""

    def distance_bias(self, d):
        return 2 * super().distance_bias(d)


@pytest.mark.parametrize("name", NAMES)
def test_other_rules_are_refused(name):
    extension = make_extension(load_yaml(catalog.find("extension", name)))
    wrong = [OwnTurn(SITE), dynamic(Rope(SITE), 64)]
    if isinstance(Alibi(SITE), extension.kind):
        wrong.append(OwnBias(SITE))
    for scheme in wrong:
        with pytest.raises(UserError, match=rf"{name} reads plain .* {type(scheme).__name__} has"):
            extension(scheme, 64)


@pytest.mark.parametrize(
    ("extend", "keys", "message"),
    [
        (
            rerope,
            {"window": 0},
            "rerope: window is 0; it must be at least 1 and below train_len 16",
        ),
        (rerope, {"window": 16}, "rerope: window is 16; .* below train_len 16"),
        (leaky_rerope, {"window": 99}, "leaky_rerope: window is 99"),
        (leaky_rerope, {"factor": 0.5}, "leaky_rerope: factor is 0.5; it must be at least 1"),
        (self_extend, {"window": -1}, "self_extend: window is -1"),
        (self_extend, {"group": 0}, "self_extend: group is 0; it must be at least 1"),
        (dca, {"chunk": 0}, "dca: chunk is 0 and limit 15; a chunk has at least 1 token"),
        (dca, {"chunk": 9, "limit": 7}, r"chunk is 9 and limit 7; .* at most limit \+ 1"),
        (string, {"shift": 4, "local": 5}, "string: shift is 4 and local 5; .* at most shift"),
        (string, {"local": 0}, "local 0; local must be at least 1"),
        (lm_infinite, {"sinks": -1}, "lm_infinite: sinks is -1 and window 16"),
        (sink_window, {"window": 0}, "sink_window: sinks is 4 and window 0"),
    ],
)
def test_wrong_parameters(extend, keys, message):
    with pytest.raises(UserError, match=message):
        extend(Rope(SITE), 64, **keys)


def test_bands_need_positions_that_count_tokens():
    """They skip keys by their number, and these positions start again."""
    scheme = Abacus(SITE, Rope)
    scheme.over = lm_infinite(scheme.over, 64)
    q, k = some(3)
    with pytest.raises(UserError, match="LmInfinite counts tokens by their positions"):
        scheme.prepare(NO_X, q, k, k, torch.tensor([0, 1, 1]), None)


def test_the_refusal_names_both_kinds():
    extension = make_extension(load_yaml(catalog.find("extension", "lm_infinite")))
    with pytest.raises(UserError, match="lm_infinite changes Rope or Alibi, not learned"):
        extension.check(load_yaml(catalog.find("scheme", "learned")))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("rerope", "rope_partial"),  # and leaky_rerope, the same class with a finite factor
        ("self_extend", "p_rope"), ("dca", "rope"), ("string", "rope"), ("lm_infinite", "rope"),
        ("lm_infinite", "alibi_learned"), ("sink_window", "rope"),
    ],
)  # fmt: skip
def test_extended_schemes_pass_all_checks(name, scheme):
    extension = make_extension(load_yaml(catalog.find("extension", name)))
    node = load_yaml(catalog.find("scheme", scheme))
    results = conformance.run(Subject(name, maker(node, extension), "a card"))
    assert [result for result in results if not result.passed] == []
