"""Training: how much of the machine is used, against peers, and what each scheme costs."""

from collections.abc import Callable

import models
import torch
from table import Row, ratio

from posx.config import ModelConfig
from posx.cost import interleave

GROUP = "train"
TAX_LEN, TAX_BATCH = 256, 16
TAXES = {
    "rope": 1.05, "alibi": 1.05, "fox": 1.15, "t5": 1.20, "kerple_log": 1.20, "fire": 1.20,
    "shaw": 1.40, "cope": 2.0,
}  # fmt: skip


def run(quick: bool, rounds: int) -> list[Row]:
    large = shape_rows(models.LARGE, 128, 64, rounds, 0.65)
    small = shape_rows(models.SMALL, 64, 64, rounds if quick else 3 * rounds, 0.50)
    return large + small + tax_rows(8 if quick else TAX_BATCH, rounds)


def shape_rows(
    shape: ModelConfig, n: int, batch: int, rounds: int, utilisation: float
) -> list[Row]:
    """Use of the machine and time by peers at one shape."""
    ids = models.tokens(batch, n + 1)
    rope, t5 = (models.posx(shape, name, n) for name in ("rope", "t5"))
    works = {"products": products(shape, batch * n)}
    works |= {
        name: models.step(model.parameters(), models.posx_forward(model), ids)
        for name, model in (("posx rope", rope), ("posx t5", t5))
    }
    llama = models.llama(shape, n)
    if llama is not None:
        forward = models.llama_forward(llama)
        works["transformers Llama"] = models.step(llama.parameters(), forward, ids)
    for name, keys in (
        ("x-transformers rope", {"attn_flash": True, "rotary_pos_emb": True}),
        ("x-transformers T5 bias", {"rel_pos_bias": True}),
    ):
        model = models.x_transformer(shape, n, **keys)
        if model is not None:
            works[name] = models.step(model.parameters(), model, ids)

    times = interleave(works, rounds)
    name = f"{shape.d_model}/{shape.n_layers}/{shape.n_heads} n={n} B={batch}"
    flops = rope.flops(n) * batch * n / product_flops(shape, batch * n)
    what = f"{name}: rope, share of torch.mm's rate"
    rows = [ratio(GROUP, what, f">= {utilisation}", times, "products", "posx rope", flops)]
    for own, other, goal in (
        ("posx rope", "transformers Llama", 1.20),
        ("posx rope", "x-transformers rope", 1.15),
        ("posx t5", "x-transformers T5 bias", 1.30),
    ):
        if other in times:
            what = f"{name}: {own}, times as fast as {other}"
            rows.append(ratio(GROUP, what, f">= {goal}", times, other, own))
    return rows


def shapes(shape: ModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of a block."""
    width = shape.n_heads * shape.d_head
    return [(shape.d_model, width)] * 4 + [(shape.d_model, shape.d_ff), (shape.d_ff, shape.d_model)]


def product_flops(shape: ModelConfig, n_tokens: int) -> int:
    return 6 * n_tokens * shape.n_layers * sum(rows * columns for rows, columns in shapes(shape))


def products(shape: ModelConfig, n_tokens: int) -> Callable[[], None]:
    """The matrix products of one step and nothing else: output, gradient of input and weight."""
    operands = []
    for rows, columns in shapes(shape):
        x, y = torch.randn(n_tokens, rows), torch.randn(n_tokens, columns)
        w = torch.randn(rows, columns)
        outs = (torch.empty_like(each) for each in (y, x, w))
        operands += zip((x, y, x.T), (w, w.T, y), outs, strict=True)

    def work() -> None:
        for _ in range(shape.n_layers):
            for a, b, out in operands:
                torch.mm(a, b, out=out)

    return work


def tax_rows(batch: int, rounds: int) -> list[Row]:
    """What each scheme costs beside no positions."""
    ids = models.tokens(batch, TAX_LEN + 1)
    works = {}
    for name in ("nope", *TAXES):
        model = models.posx(models.LARGE, name, TAX_LEN)
        works[name] = models.step(model.parameters(), models.posx_forward(model), ids)
    times = interleave(works, rounds)
    return [
        ratio(GROUP, f"128/4/4 n={TAX_LEN} B={batch}: {name}, time by nope's", f"<= {goal}", times,
              name, "nope")
        for name, goal in TAXES.items()
    ]  # fmt: skip
