"""Free-running generation: what one pass spares, and against peers."""

from collections.abc import Callable
from functools import partial

import models
import torch
from table import Row, ratio

from posx import generate
from posx.attention import Cache
from posx.cost import interleave

GROUP = "decode"


@torch.no_grad()
def run(quick: bool, rounds: int) -> list[Row]:
    rows = one_pass_rows(2048 if quick else 8192, 1)
    rows += peer_rows(512, 256, rounds)
    return rows + cached_rows(2048 if quick else 8192, rounds)


def one_pass_rows(n: int, rounds: int) -> list[Row]:
    """Exact match is known from one teacher-forced pass; free running takes one a token."""
    model, digits = models.posx(models.LARGE, "rope"), models.VOCAB.split(models.tokens(1, n))
    half = n // 2
    times = interleave(
        {
            "pass": lambda: model(digits, last=half).argmax(-1),
            "free": lambda: generate.greedy(model, digits[:, :-half], half),
        },
        rounds,
    )
    what = f"exact match at {n}: one pass, times as fast as free running"
    return [ratio(GROUP, what, ">= 10", times, "free", "pass")]


def peer_rows(n: int, n_new: int, rounds: int) -> list[Row]:
    """Tokens up to a context of n, one sequence."""
    prompt = models.tokens(1, n - n_new)
    own, digits = models.posx(models.LARGE, "rope"), models.VOCAB.split(prompt)
    works = {"own": lambda: generate.greedy(own, digits, n_new)}
    goals = {}
    llama = models.llama(models.LARGE, n)
    if llama is not None:
        goals["transformers generate"] = 3
        works["transformers generate"] = partial(
            llama.eval().generate, prompt, max_new_tokens=n_new, do_sample=False
        )
    model = models.x_transformer(models.LARGE, n, attn_flash=True, rotary_pos_emb=True)
    if model is not None:
        wrapped = models.peer("x_transformers").AutoregressiveWrapper(model).eval()
        goals["x-transformers generate"] = 5
        works["x-transformers generate"] = partial(
            wrapped.generate, prompt, n_new, temperature=0.0, cache_kv=True
        )
    times = interleave(works, rounds)
    return [
        ratio(GROUP, f"{n_new} tokens up to {n}: times as fast as {name}", f">= {goal}", times,
              name, "own")
        for name, goal in goals.items()
    ]  # fmt: skip


def cached_rows(n: int, rounds: int, steps: int = 16) -> list[Row]:
    """Steps behind a cache of n tokens, by those of transformers with its dynamic cache."""
    llama = models.llama(models.LARGE, n + steps)
    if llama is None:
        return []
    ids = models.tokens(1, n)
    own = models.posx(models.LARGE, "rope")
    caches = [Cache() for _ in own.layers]
    own(models.VOCAB.split(ids), last=1, caches=caches)
    past = llama.eval()(ids, use_cache=True, logits_to_keep=1).past_key_values

    def our_steps() -> None:
        feed = models.VOCAB.split(ids[:, :1])
        for _ in range(steps):
            feed = own(feed, last=1, caches=caches).argmax(-1)

    def their_steps() -> None:
        feed = ids[:, :1]
        for _ in range(steps):
            feed = llama(feed, past_key_values=past, use_cache=True).logits.argmax(-1)

    works: dict[str, Callable[[], None]] = {"own": our_steps, "peer": their_steps}
    what = f"{steps} tokens behind {n}: times as fast as transformers"
    return [ratio(GROUP, what, ">= 4", interleave(works, rounds), "peer", "own")]
