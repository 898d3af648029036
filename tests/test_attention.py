"""Every path of attention against the definition, for blocks of any size."""

from functools import partial
from typing import Any

import pytest
import torch
from test_conformance import SCHEMES, Gated, subject
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posx import attention
from posx.attention import DENSE, attend, block, choose_path
from posx.conformance import B, D, H, Layer, Subject, by_rows, layer
from posx.schemes.base import Nope, Scheme
from posx.schemes.relative import Shaw


class Sinks(Scheme):
    """The first two keys and a window of three: a band with sinks."""

    band = (2, 3)

    def mask(self, i: Tensor, j: Tensor) -> Tensor:
        near = i[..., :, None] - j[..., None, :] < 3  # (T, S) or (B, T, S)
        return (near | (j[..., None, :] < 2)).unsqueeze(-3)


class Even(Scheme):
    """Equal weights for all visible keys."""

    def normalize(self, z: Tensor) -> Tensor:
        seen = z.isfinite()
        return seen / seen.sum(-1, keepdim=True).to(z.dtype)


SUBJECTS = {name: subject(name) for name in SCHEMES}
SUBJECTS |= {each.__name__: Subject(each.__name__, each, "") for each in (Sinks, Even, Gated)}
N = 40  # keys; more than the window of every scheme, and no multiple of 7


def make(name: str, own_positions: bool = False) -> Layer:
    """A layer in float64, with other positions in every sequence where asked for."""
    scheme = SUBJECTS[name].scheme(train_len=N).double()
    if own_positions:
        steps = torch.tensor([[1], [3]])  # (B, 1)

        def positions(self: Scheme, symbols: Tensor, offset: int, generator: None) -> Tensor:
            ids = steps * torch.arange(symbols.shape[1]) + offset  # (B, T)
            return ids if self.max_len is None else ids // 3  # within the limit

        own = {"positions": positions}
        scheme.__class__ = type("Own", (type(scheme),), own)
    given = layer(scheme, N, dtype=torch.float64)
    leaves = (x.detach().requires_grad_() for x in given[1:4])
    state = None if given.state is None else given.state.detach().requires_grad_()
    return Layer(scheme, *leaves, given.pos, state)


def of_last(given: Layer, n_queries: int) -> tuple[Any, ...]:
    """Arguments of `attend` and `block` for the last queries, as after cached keys."""
    scheme, q, k, v, pos, state = given
    return scheme, q[:, :, -n_queries:], k, v, pos[..., -n_queries:], pos, state


def gradients(given: Layer, out: Tensor) -> list[Tensor]:
    """Of everything that reaches `out`; zero where nothing does."""
    leaves = [*given[1:4], *([] if given.state is None else [given.state])]
    leaves += given.scheme.parameters()
    return list(
        torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)
    )


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of queries of the blocks that attention computes; nothing is dense."""
    found = []

    def counted(scheme: Scheme, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        found.append(q.shape[2])
        return block(scheme, q, *rest)

    monkeypatch.setattr(attention, "block", counted)
    monkeypatch.setattr(attention, "DENSE", 0)
    return found


def set_rows(monkeypatch: pytest.MonkeyPatch, scheme: Scheme, rows: int) -> None:
    sinks, window = scheme.band or (0, N)
    row_bytes = 4 * B * H * min(N, sinks + 2 * window)
    monkeypatch.setattr(attention, "BLOCK_BYTES", rows * row_bytes)
    monkeypatch.setattr(attention, "STRIP_ROWS", rows)
    monkeypatch.setattr(attention, "MERGE_ROWS", rows)


@pytest.mark.parametrize("own_positions", [False, True], ids=["", "own_positions"])
@pytest.mark.parametrize(("rows", "n_queries"), [(1, 11), (7, N), (N, 11)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_blocks_of_any_size_equal_one(
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    name: str,
    rows: int,
    n_queries: int,
    own_positions: bool,
) -> None:
    """Outputs and gradients, in evaluation and training; float64 rounds sums of 40 terms to about
    1e-15 and gradients of order 10 to 1e-14."""
    given = make(name, own_positions)
    arguments = of_last(given, n_queries)
    dense = block(*arguments)[0]
    set_rows(monkeypatch, given.scheme, rows)
    with torch.no_grad():
        assert (attend(*arguments) - dense).abs().max() < 1e-12
    most = min(rows, given.scheme.band[1] if given.scheme.band else N, n_queries)
    if choose_path(given.scheme, n_queries, N, training=False) in ("blocks", "banded"):
        assert max(sizes) == most
        assert sum(sizes) == n_queries
    trained = attend(*arguments)
    assert (trained - dense).abs().max() < 1e-12
    for got, want in zip(gradients(given, trained), gradients(given, dense), strict=True):
        assert (got - want).abs().max() < 1e-11


def test_block_sizes_reach_every_path_that_has_blocks(sizes: list[int]) -> None:
    """What the test above goes through, so that a new choice of path does not empty it."""
    paths = {
        choose_path(make(name).scheme, queries, N, training)
        for name in SUBJECTS
        for queries in (N, 11)
        for training in (False, True)
    }
    assert paths == {"sdpa", "strips", "folded", "banded", "merged", "blocks"}


def test_paths_follow_the_hooks() -> None:
    def path(name: str, queries: int, keys: int, training: bool) -> str:
        return choose_path(SUBJECTS[name].scheme(), queries, keys, training)

    long = DENSE + 1
    assert path("rope", 9, 9, False) == "sdpa"
    assert path("rope", 1, 9, False) == "sdpa"
    assert path("rope", 4, 9, False) == "strips"  # a piece after cached keys
    assert path("alibi", 9, 9, False) == "strips"
    assert path("alibi", 9, 9, True) == "masked"
    assert path("alibi", long, long, True) == "folded"
    assert path("t5", 9, 9, True) == "dense"  # its bias needs a gradient
    assert path("t5", long, long, True) == "blocks"
    assert path("shaw", 9, 9, False) == "dense"
    assert path("shaw", long, long, False) == "merged"
    assert path("shaw", long, long, True) == "blocks"
    assert path("window", long, long, False) == "banded"
    assert path("Gated", 9, 9, False) == "dense"
    assert path("Gated", 9, 9, True) == "folded"


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor) and each.is_contiguous():  # views take no memory
                self.numel = max(self.numel, each.numel())
        return out


@pytest.mark.parametrize("name", SCHEMES)
def test_no_n_by_n_tensor_at_8192_tokens(name: str) -> None:
    n, last = 8192, 200
    scheme = SUBJECTS[name].scheme()
    if scheme.max_len is not None:  # then it is as long as its training was
        scheme = SUBJECTS[name].scheme(train_len=n)
        n = min(n, scheme.max_len or n)
    with torch.no_grad():
        given = layer(scheme, n)
        with Largest() as largest:
            out = attend(*of_last(given, last))
    assert out.isfinite().all()
    # B x H x 200 x 8192 scores are 10^7: blocks of them fit, and no square, however few its heads
    assert largest.numel < n * n / 16, f"a tensor of {largest.numel} elements"


def test_trained_bias_beyond_the_dense_limit_gets_the_same_gradient() -> None:
    """Blocks of the real size with recomputation against one dense block."""
    given = layer(SUBJECTS["t5"].scheme(), DENSE + 5)
    arguments = of_last(given, DENSE + 5)
    got, want = (gradients_of_bias(given, way(*arguments)) for way in (attend, dense))
    assert (got - want).abs().max() / want.abs().max() < 1e-4  # sums of 10^6 float32 terms


def dense(*arguments: Any) -> Tensor:
    return block(*arguments)[0]


def gradients_of_bias(given: Layer, out: Tensor) -> Tensor:
    return torch.autograd.grad(out.square().sum(), next(given.scheme.parameters()))[0]


@pytest.mark.parametrize("autocast", [False, True])
def test_folded_bias_is_not_rounded_in_half_precision(autocast: bool) -> None:
    """Beyond 256 bfloat16 has no number for every position; the fold is computed in float32."""
    n, last = DENSE + 30, 5
    given = layer(SUBJECTS["alibi"].scheme(), n)
    half = given._replace(q=given.q.bfloat16(), k=given.k.bfloat16(), v=given.v.bfloat16())
    assert choose_path(given.scheme, n, n, training=True) == "folded"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = attend(*of_last(half, n))[:, :, -last:]
    assert got.dtype == torch.bfloat16
    # outputs of order 1 have 8 bits; rounded positions would be off by 0.7
    assert (got.double() - by_rows(half, last)).abs().max() < 8e-3


def test_band_with_sinks_skips_keys_exactly() -> None:
    """Against a formula, not against `block`."""
    given = layer(Sinks(SUBJECTS["nope"].site()), 29)
    with torch.no_grad():
        got = attend(*of_last(given, 29))
    z = given.q @ given.k.transpose(-1, -2) / 8**0.5
    i, j = given.pos[:, None], given.pos
    visible = (j <= i) & ((i - j < 3) | (j < 2))
    expected = z.masked_fill(~visible, -torch.inf).softmax(-1) @ given.v
    assert (got - expected).abs().max() < 1e-5


def test_normalize_hook_replaces_softmax() -> None:
    given = layer(Even(SUBJECTS["nope"].site()), 7)
    mean = given.v.cumsum(2) / torch.arange(1, 8)[:, None]
    assert (attend(*of_last(given, 7)) - mean).abs().max() < 1e-6


def test_nope_sees_order_through_the_mask_alone() -> None:
    """Without a mask attention commutes with permutations of the tokens; with it, it does not."""
    given = layer(Nope(SUBJECTS["nope"].site()), 6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    scores = given.q @ given.k.transpose(-1, -2) / 8**0.5
    free = scores.softmax(-1) @ given.v
    moved = given.q[:, :, order] @ given.k[:, :, order].transpose(-1, -2) / 8**0.5
    assert (moved.softmax(-1) @ given.v[:, :, order] - free[:, :, order]).abs().max() < 1e-6
    causal = attend(*of_last(given, 6))
    turned = given._replace(**{part: getattr(given, part)[:, :, order] for part in "qkv"})
    assert (attend(*of_last(turned, 6)) - causal[:, :, order]).abs().max() > 0.1


class FarGated(Gated):
    """The forget gates with their form for far keys: a term a query and a term a key."""

    reach = 3

    def far(
        self, q: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        total = self._total(state)  # (B, H, N)
        start = total[:, :, -q.shape[2], None]  # (B, H, 1), what both terms are counted from
        by_query = (total[:, :, -q.shape[2] :] - start)[..., None]
        return by_query, (start - total[:, :, : j.shape[-1]])[:, :, None], None


@pytest.mark.parametrize("n_queries", [DENSE + 5, 70])
@pytest.mark.parametrize("make_scheme", [FarGated, partial(Shaw, k=5)], ids=["gates", "vectors"])
def test_far_keys_are_merged_exactly(
    monkeypatch: pytest.MonkeyPatch, make_scheme: Any, n_queries: int
) -> None:
    monkeypatch.setattr(attention, "MERGE_ROWS", 64)
    scheme = Subject("far", make_scheme, "").scheme()
    given = layer(scheme, DENSE + 5)
    assert choose_path(scheme, n_queries, DENSE + 5, training=False) == "merged"
    with torch.no_grad():
        got = attend(*of_last(given, n_queries))[:, :, -66:]
    # sums of 1029 float32 terms of order 1
    assert (got.double() - by_rows(given, 66)).abs().max() < 5e-6


def test_far_keys_are_not_merged_where_the_kernel_gives_no_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheme = FarGated(SUBJECTS["nope"].site())
    assert choose_path(scheme, 9, DENSE + 1, training=True) == "folded"
    assert choose_path(scheme, 9, DENSE + 1, training=False, device="cuda") == "blocks"
    monkeypatch.setattr(attention, "WITH_LSE", None)
    assert choose_path(scheme, 9, DENSE + 1, training=False) == "blocks"


class Hump(Scheme):
    """A bias that falls, rises again far away in one head, and falls for good."""

    def distance_bias(self, d: Tensor) -> Tensor:
        d = d.double()
        falls = torch.stack([-3.0 * d, -0.5 * d, -0.001 * d])
        falls[1] = torch.where(d > 900, -10.0, falls[1])
        return falls.float()


def test_keys_without_weight_are_skipped_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Hump(SUBJECTS["nope"].site())
    given = layer(scheme, 1000)
    u = scheme.distance_bias(torch.arange(999, -1, -1))
    reach = attention._reach(u, given.q, given.k, D)
    assert reach[0] < 60  # 2 M is some 20 here
    assert reach[1:] == [1000, 1000]  # what is far may count, whatever lies between
    with torch.no_grad():
        got = attend(*of_last(given, 1000))[:, :, -40:]
    assert (got.double() - by_rows(given, 40)).abs().max() < 2e-6


def test_reach_is_a_bound() -> None:
    """With the largest scores that the norms allow, everything skipped weighs below 2^-24."""
    n, slope = 400, 0.7
    q, k = torch.zeros(1, 1, n, 8), torch.zeros(1, 1, n, 8)
    q[..., 0], k[..., 0] = 4.0, 5.0
    k[:, :, -1, 0] = -5.0  # the own key of the last query is the worst, the others the best
    u = -slope * torch.arange(n - 1, -1, -1.0)[None]
    (reach,) = attention._reach(u, q, k, D)
    z = q[0, 0, -1].double() @ k[0, 0].double().T / 8**0.5 + u[0].double()
    p = (z - z[-1]).exp()
    assert p[: n - reach].sum() < 2**-24
    assert reach < n / 4


class Doubled(Scheme):
    """Queries and keys of two numbers a dimension, so the score is twice that of NoPE."""

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return torch.cat([q, q], -1), torch.cat([k, k], -1), v, None


class DoubledFalls(Doubled):
    """The same with a bias, in both of its forms."""

    def distance_bias(self, d: Tensor) -> Tensor:
        return -0.1 * d.double().expand(self.site.n_heads, *d.shape)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        key = 0.1 * self.site.d_head**0.5 * pos.double().view(1, 1, -1, 1).expand(1, H, -1, 1)
        return torch.ones_like(key), key


@pytest.mark.parametrize("kind", [Doubled, DoubledFalls])
@pytest.mark.parametrize("n_queries", [1, 11, N])
@pytest.mark.parametrize("dense_keys", [0, DENSE])
@pytest.mark.parametrize("training", [False, True])
def test_wide_queries_and_keys(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Scheme],
    n_queries: int,
    dense_keys: int,
    training: bool,
) -> None:
    """Against a loop: scores are divided by sqrt(d_head), whatever the width of q and k."""
    monkeypatch.setattr(attention, "DENSE", dense_keys)
    scheme = kind(SUBJECTS["nope"].site())
    given = layer(scheme, N, dtype=torch.float64)
    plain = layer(SUBJECTS["nope"].scheme(), N, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        got = attend(*of_last(given, n_queries))
    assert got.shape == (B, H, n_queries, 8)
    for t in range(N - n_queries, N):
        z = 2 * (plain.q[:, :, t, None] * plain.k[:, :, : t + 1]).sum(-1) / 8**0.5  # (B, H, t + 1)
        if kind is DoubledFalls:
            z = z - 0.1 * (t - torch.arange(t + 1)).double()
        want = (z.softmax(-1)[..., None] * plain.v[:, :, : t + 1]).sum(2)
        assert (got[:, :, t - N] - want).abs().max() < 1e-12


@pytest.mark.parametrize("training", [False, True])
def test_wide_queries_and_keys_stay_on_the_fused_kernel(training: bool) -> None:
    """Its fall-back for a value of another width holds n x n scores."""
    n = 3000
    given = layer(Doubled(SUBJECTS["nope"].site()), n)
    with torch.set_grad_enabled(training), Largest() as largest:
        attend(*of_last(given, n))
    assert largest.numel < n * n / 16
