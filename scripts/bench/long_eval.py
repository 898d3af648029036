"""Long inputs: one attention layer by the fused causal kernel, whole models by peers, memory."""

import copy
import math
from collections.abc import Callable
from functools import partial

import models
import torch
import torch.nn.functional as F
from table import Row, ratio
from torch import Tensor

from posx.attention import attend, block
from posx.conformance import Layer, stirred
from posx.cost import interleave
from posx.memory import Peak
from posx.schemes.base import Site

GROUP = "long-eval"
SITE = Site(d_model=128, n_heads=4, d_head=32, train_len=models.TRAIN_LEN, n_layers=4)
GOALS = {"t5": 1.15, "kerple_log": 1.15, "fox": 1.25, "shaw": 1.5, "cope": 4.0}
ALIBI = {8192: 0.7, 32768: 0.35}
ROWS = 8  # queries compared with float64, at each of three places
CPU = torch.device("cpu")


def run(quick: bool, rounds: int) -> list[Row]:
    rows = attention_rows(4096 if quick else 8192, rounds)
    if not quick:
        rows += attention_rows(32768, 3)
    rows += model_rows(2048 if quick else 8192, 2048 if quick else 4096, 1 if quick else 3)
    return rows + memory_rows(8192 if quick else 131072)


def attention_rows(n: int, rounds: int) -> list[Row]:
    """Time and error of one layer, random queries and keys, under each scheme."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, n, SITE.d_model, generator=random)
    q, k, v = (torch.randn(1, 4, n, 32, generator=random) for _ in range(3))
    pos = torch.arange(n)
    goals = {"alibi": ALIBI.get(n), **GOALS}
    works: dict[str, Callable[[], Tensor]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    }
    errors = {}
    for name in goals:
        torch.manual_seed(0)
        scheme = stirred(models.scheme(name)(SITE))
        works[name] = lambda scheme=scheme: attend(
            scheme, *(p := scheme.prepare(x, q, k, v, pos, None))[:3], pos, pos, p[3]
        )
        errors[name] = error(Layer(scheme, q, k, v, pos, None), x, works[name])
    with torch.no_grad():
        times = interleave(works, rounds)
    rows = []
    for name, goal in goals.items():
        what = f"attention at {n}: {name}"
        limit = "" if goal is None else f"<= {goal}"
        rows.append(ratio(GROUP, f"{what}, time by is_causal", limit, times, name, "sdpa"))
        rows.append(Row(GROUP, f"{what}, error to float64", "<= 2e-6", errors[name], unit=""))
    return rows


@torch.no_grad()
def error(given: Layer, x: Tensor, work: Callable[[], Tensor]) -> float:
    """The largest difference to float64, of a few queries at the start, middle and end."""
    scheme = copy.deepcopy(given.scheme).double()
    q, k, v = given.q.double(), given.k.double(), given.v.double()
    q, k, v, state = scheme.prepare(x.double(), q, k, v, given.pos, None)
    out, n, worst = work(), q.shape[2], 0.0
    for stop in (n // 8, n // 2, n):
        here, seen = slice(stop - ROWS, stop), slice(0, stop)
        right, _ = block(
            scheme, q[:, :, here], k[:, :, seen], v[:, :, seen], given.pos[here], given.pos[seen],
            None if state is None else state[:, seen],
        )  # fmt: skip
        worst = max(worst, (out[:, :, here].double() - right).abs().max().item())
    return worst


def model_rows(n: int, n_bias: int, rounds: int) -> list[Row]:
    """Whole models by peers; the bias of T5 in x-transformers needs several GiB at n_bias."""
    rows = []
    for length, name, goal, label, keys in (
        (n, "alibi", 8, "x-transformers ALiBi", {"attn_flash": True, "alibi_pos_bias": True}),
        (n_bias, "t5", 25, "x-transformers T5 bias", {"rel_pos_bias": True}),
        (n, "rope", 1, "transformers Llama", None),
    ):
        peer = (
            models.llama(models.LARGE, length)
            if keys is None
            else models.x_transformer(models.LARGE, length, **keys)
        )
        if peer is None:
            continue
        own, ids = models.posx(models.LARGE, name), models.tokens(1, length)
        works = {"own": partial(models.posx_forward(own), ids), "peer": partial(peer.eval(), ids)}
        with torch.no_grad():
            if rounds == 1 or length * rounds > 2**14:  # a peer may take half a minute
                times = interleave(works, rounds)
            else:
                times = interleave(works, rounds + 2)
        what = f"128/4/4 at {length}: {name}, times as fast as {label}"
        rows.append(ratio(GROUP, what, f">= {goal}", times, "peer", "own"))
    return rows


@torch.no_grad()
def memory_rows(longest: int) -> list[Row]:
    """Memory of whole models above their weights."""
    n = min(longest, 8192)
    rows = []
    for name in ("rope", "alibi", "t5"):
        model = models.posx(models.LARGE, name)
        own = 24 * n * models.LARGE.d_model / 2**20 + 4 * models.LARGE.n_heads * n / 2**20 + 16
        what = f"128/4/4 at {n}: {name}, memory above weights"
        rows.append(Row(GROUP, what, f"<= {math.floor(own)}", peak(model, n), unit="MiB"))
    if longest > n:
        model = models.posx(models.LARGE, "alibi")
        what = f"128/4/4 at {longest}: alibi, memory above weights"
        rows.append(Row(GROUP, what, "<= 512", peak(model, longest), unit="MiB"))
    return rows


def peak(model: models.Transformer, n: int) -> float:
    """MiB of one pass, logits of the last half as in evaluation."""
    digits = models.VOCAB.split(models.tokens(1, n))
    model(digits[:, :64])
    with Peak(CPU) as found:
        model(digits, last=n // 2)
    return found.mib
