"""PaTH against published values and products of dense matrices."""

import copy
import math

import pytest
import torch
from oracles import NO_X, SITE, B, D, E, H, S, T, close, golden

from posx.attention import block
from posx.errors import UserError
from posx.schemes import path
from posx.schemes.base import Site
from posx.schemes.path import Path, reflected_scores

J = torch.arange(S)


def vectors(n, n_heads=H, width=D):
    """q, k, w of length 1 (B, H, n, D) and b in (0, 2): (B, H, n)."""
    q, k, w = (torch.randn(B, n_heads, n, width) for _ in range(3))
    return q, k, w / w.norm(dim=-1, keepdim=True), 2 * torch.rand(B, n_heads, n)


def scores_by_matrices(q, k, w, b):
    """k_j^T H_{j+1} ... H_i q_i of j <= i from D x D matrices in float64; 0 elsewhere."""
    q, k, w, b = (x.double() for x in (q, k, w, b))
    n_queries, n_keys, width = q.shape[2], k.shape[2], q.shape[3]
    eye = torch.eye(width, dtype=torch.float64)
    z = torch.zeros(*q.shape[:3], n_keys, dtype=torch.float64)
    for t in range(n_queries):
        i = n_keys - n_queries + t
        product = eye
        for j in range(i, -1, -1):  # product: H_{j+1} ... H_i
            z[:, :, t, j] = torch.einsum(
                "bhd,bhde,bhe->bh", k[:, :, j], product.expand(*q.shape[:2], -1, -1), q[:, :, t]
            )
            reflection = eye - b[:, :, j, None, None] * w[:, :, j, :, None] * w[:, :, j, None]
            product = reflection @ product
    return z


def causal(z):
    return z.tril(z.shape[-1] - z.shape[-2])


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 9), (5, 9), (9, 9), (4, 8), (3, 13)])
def test_chunks_equal_matrices(monkeypatch, chunk, n_queries, n_keys):
    monkeypatch.setattr(path, "CHUNK", chunk)
    q, k, w, b = vectors(n_keys)
    q = q[:, :, -n_queries:]
    got = reflected_scores(q, k, w, b)
    assert got.isfinite().all()
    close(causal(got), scores_by_matrices(q, k, w, b), 1e-5)  # float32, scores of up to 15


def test_long_products_stay_exact():
    """Of 99 reflections, many of them near -1 and 1 along their vectors."""
    q, k, w, b = vectors(99, 1, 4)
    b = torch.where(b < 1, b / 20, 2 - (2 - b) / 20)
    close(causal(reflected_scores(q, k, w, b)), scores_by_matrices(q, k, w, b), 5e-5)


def test_full_reflections_keep_lengths_and_no_reflection_is_a_dot_product():
    q, k, w, b = vectors(S)
    close(causal(reflected_scores(q, k, w, 0 * b)), causal(q @ k.mT), 1e-5)
    one = torch.ones(B, H, S)
    again = reflected_scores(w, w, w, one)  # its own reflection takes w away, but from later keys
    close(causal(again).diagonal(dim1=-2, dim2=-1), torch.ones(B, H, S), 1e-6)
    close(causal(again).tril(-1), torch.zeros(B, H, S, S), 1e-5)


def golden_parts():
    values = golden("contextual")
    q, k, v, w = (
        torch.tensor(x).transpose(0, 1)[None]
        for x in (values["q"], values["k"], values["v"], values["path"]["w"])
    )
    b, gate = (torch.tensor(x)[None] for x in (values["path"]["beta"], values["log_forget_gate"]))
    return q, k, v, w, b, gate, values["path"]


@pytest.mark.parametrize("forget_gate", [False, True])
def test_golden(forget_gate):
    q, k, v, w, b, gate, values = golden_parts()
    site = Site(d_model=8, n_heads=2, d_head=4, train_len=16)
    scheme = Path(site, rank=3, forget_gate=forget_gate, scale_gate=forget_gate)
    parts = [w.transpose(1, 2).flatten(2), b, *([gate] if forget_gate else [])]
    state = torch.cat([*parts, torch.zeros(1, 6, 3)], -1)
    pos = torch.arange(6)
    out, _ = block(scheme, q, k, v, pos, pos, state)
    want = values["out_with_forget_gate" if forget_gate else "out"]
    close(out[0].transpose(0, 1), want, 1e-6)


def state_by_loops(scheme, x):
    """w (B, H, S, D), b and the log of the gate (B, H, S), in float64."""
    scheme = copy.deepcopy(scheme).double()
    x, n = x.double(), x.shape[1]
    w = torch.zeros(B, H, n, D, dtype=torch.float64)
    b, gate = (torch.zeros(B, H, n, dtype=torch.float64) for _ in range(2))
    for r in range(B):
        wide = [scheme.up.weight @ (scheme.down.weight @ x[r, t]) for t in range(n)]
        for t in range(n):
            mixed = sum(scheme.taps[2 - back] * wide[t - back] for back in range(min(3, t + 1)))
            mixed = mixed / (1 + (-mixed).exp()) if scheme.silu else mixed
            for h in range(H):
                part = mixed[h * D : (h + 1) * D]
                w[r, h, t] = part / part.norm()
                u = scheme.strength.weight[h] @ x[r, t] + scheme.strength.bias[h]
                b[r, h, t] = 2 / (1 + (-u).exp())
                if scheme.gate is not None:
                    g = scheme.gate.weight[h] @ x[r, t] + scheme.gate.bias[h]
                    gate[r, h, t] = -(1 + (-g).exp()).log()
    return w.detach(), b.detach(), gate.detach()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("forget_gate", "scale_gate"), [(False, False), (True, False), (True, True)]
)
def test_scheme_equals_loops(silu, forget_gate, scale_gate):
    scheme = Path(SITE, 5, silu, forget_gate, scale_gate)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    x = torch.randn(B, S, E)
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    state = scheme.prepare(x, q, k, v, J, None)[3]
    own, other = q[:, :, -T:], torch.randn(B, H, T, S)  # what another scheme added stays
    z = own @ k.mT / math.sqrt(D) + other
    got = scheme.scores(z, own, k, J[-T:], J, state) - other
    w, b, gate = state_by_loops(scheme, x)
    want = scores_by_matrices(own, k, w, b) / math.sqrt(D)
    for t in range(T):
        for s in range(S - T + t):
            faded = gate[:, :, s + 1 : S - T + t + 1].sum(-1)
            want[:, :, t, s] += faded / math.sqrt(D) if scale_gate else faded
    close(causal(got), want, 1e-5)


def test_the_convolution_goes_on_where_it_stopped():
    scheme = Path(SITE, forget_gate=True)
    x = torch.randn(B, S, E)
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    whole = scheme.prepare(x, q, k, v, J, None)[3]
    past, start = None, 0
    for size in (1, 1, 5, 2):
        here = slice(start, start + size)
        part = (x[:, here], q[:, :, here], k[:, :, here], v[:, :, here], J[here])
        state = scheme.prepare(*part, past)[3]
        past = state if past is None else torch.cat([past, state], 1)
        start += size
    close(past, whole.detach(), 1e-6)


def test_parameters_and_precision():
    scheme = Path(SITE)
    width = H * D
    plain = 32 * (E + width) + 3 * width + (E + 1) * H
    assert sum(p.numel() for p in scheme.parameters()) == plain
    gated = Path(SITE, forget_gate=True)
    assert sum(p.numel() for p in gated.parameters()) == plain + (E + 1) * H
    half = gated.bfloat16()
    x = torch.randn(B, S, E, dtype=torch.bfloat16)
    assert half.prepare(x, NO_X, NO_X, NO_X, J, None)[3].dtype == torch.float32


def test_bad_parameters_are_refused():
    with pytest.raises(UserError, match="path: rank is 0; it must be at least 1"):
        Path(SITE, rank=0)
    with pytest.raises(UserError, match="path: scale_gate=true scales the gate"):
        Path(SITE, scale_gate=True)
