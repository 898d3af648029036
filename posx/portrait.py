"""A picture of a scheme: what it does to the scores of equal tokens, or which keys it shows.

Computed through the hooks alone, so it draws a third party's scheme as well as ours.
"""

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from posx.attention import block, scores
from posx.errors import UserError
from posx.runs import write_atomic
from posx.schemes.base import Scheme

MASK_TOKENS = 36  # side of a drawn mask
CURVES = 4  # heads drawn, evenly chosen; more cannot be told apart
ASCII = str.maketrans("┌┐└┘─│├┤▔⣿█", "++++-|++-##")


@dataclass(frozen=True)
class Portrait:
    """Curves over the distance 0 .. n - 1 from the last of n tokens, and masks, by head.

    curves: `ordinate` says of what. masks: bool (T, T), a row a query, none where every earlier key
    is visible.
    """

    ordinate: str
    curves: dict[str, Tensor]
    masks: dict[str, Tensor]

    def caption(self) -> str:
        """What is drawn."""
        curves = [f"{self.ordinate}, over the distance in tokens"] if self.curves else []
        masks = ["the visible keys (#) of each query, a row"] if self.masks else []
        return " and ".join(curves + masks)


@torch.no_grad()
def portray(scheme: Scheme, n: int) -> Portrait:
    """The scheme on n tokens that are all alike, so that position alone tells them apart.

    Drawn is what the last query's score gains at each distance, up to its own key; where scores
    stay, the mask; and where there is none, the weights, unless these are even.
    """
    site = scheme.site
    symbols = torch.ones(1, n, dtype=torch.bool)
    pos = scheme.positions(symbols, 0, None)
    x = torch.zeros(1, n, site.d_model)
    inside = scheme.overrides("embed")
    embedded = scheme.embed(x, pos)  # (1, n, E)
    shape = (1, n, site.n_heads, site.d_head)
    width = site.n_heads * site.d_head
    alike = torch.nn.functional.pad(embedded, (0, max(0, width - site.d_model)))[..., :width]
    q = (alike if inside else torch.ones(1, n, width)).view(shape).transpose(1, 2)  # (1, H, n, D)
    q, k, v, state = scheme.prepare(embedded, q, q, q, pos, None)
    one = q[:, :, -1:], k, pos[..., -1:], pos, state
    z = scores(scheme, *one)[0, :, 0].flip(-1).double()  # (H, n), by distance
    gain = z - z[:, :1]
    _, p = block(scheme, q[:, :, -1:], k, v, pos[..., -1:], pos, state)
    weights = p[0, :, 0].flip(-1).double()  # (H, n)
    if gain.abs().max() > 1e-4:
        ordinate, rows = "score against that of the own key", gain
    else:
        ordinate, rows = "attention weight", weights
    here = pos[..., :MASK_TOKENS]
    shown = scheme.mask(here, here)
    masks = {}
    if shown is not None:
        side = here.shape[-1]
        shown = shown.expand(1, site.n_heads, side, side)[0]  # (H, T, T)
        masks = _by_head(shown & torch.ones(side, side, dtype=torch.bool).tril())
    even = (rows - rows[:, :1]).abs().max() < 1e-6
    if even or (masks and rows is weights):
        return Portrait(ordinate, {}, masks)
    return Portrait(ordinate, _by_head(rows), masks)


def _by_head(rows: Tensor) -> dict[str, Tensor]:
    """Some heads of (H, ...); one where all are alike."""
    n_heads = len(rows)
    if torch.allclose(rows.double(), rows[:1].double().expand_as(rows), atol=1e-6):
        return {"every head": rows[0]}
    picked = torch.linspace(0, n_heads - 1, min(CURVES, n_heads)).round().long().tolist()
    return {f"head {head + 1}": rows[head] for head in picked}


def as_text(portrait: Portrait, width: int, ascii_only: bool, color: bool) -> str:
    """The portrait for a terminal of `width` columns; empty when there is nothing to draw."""
    parts = []
    if portrait.curves:
        import uniplot

        curves = [row.masked_fill(~row.isfinite(), math.nan) for row in portrait.curves.values()]
        parts.append(
            uniplot.plot_to_string(
                ys=[row.numpy() for row in curves],
                xs=[list(range(len(row))) for row in curves],
                lines=True,
                width=min(width, 100) - 12,  # the frame and the numbers beside it
                height=12,
                legend_labels=list(portrait.curves),
                character_set="ascii" if ascii_only else "braille",
                color=color,
            )
        )
    for label, mask in portrait.masks.items():
        lines = ["".join("#" if seen else "." for seen in row) for row in mask.tolist()]
        parts.append("\n".join([label, *lines]))
    text = "\n\n".join(parts)
    return text.translate(ASCII) if ascii_only else text


def save(portrait: Portrait, path: Path, title: str) -> None:
    """Draw the portrait into a file.

    Raises:
        UserError: the suffix is none of png, svg and pdf, or matplotlib is missing.
    """
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"cannot draw {path}: the name must end in .png, .svg, .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("posx show --plot needs matplotlib: pip install 'posx[plot]'") from None
    panels = bool(portrait.curves) + len(portrait.masks)
    if not panels:
        raise UserError(f"{title} has nothing to draw: it changes neither scores nor visible keys")
    figure = Figure(figsize=(5 * panels, 3.5), dpi=150, layout="constrained")
    axes = iter(figure.subplots(1, panels, squeeze=False).flat)
    figure.suptitle(title)
    if portrait.curves:
        axis = next(axes)
        for label, row in portrait.curves.items():
            axis.plot(row, label=label)
        axis.set(xlabel="distance i - j, tokens", ylabel=portrait.ordinate)
        axis.legend()
        axis.grid(alpha=0.3)
    for label, mask in portrait.masks.items():
        axis = next(axes)
        axis.imshow(mask, cmap="Greys", vmin=0, vmax=1.5)
        axis.set(xlabel="key j", ylabel="query i", title=f"visible keys, {label}")
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower())
    write_atomic(path, lambda file: file.write(data.getbuffer()))


def ascii_locale(encoding: str | None) -> bool:
    """Whether an output with this encoding cannot show braille."""
    try:
        "⣿".encode(encoding or "ascii")
    except UnicodeError:
        return True
    return os.environ.get("TERM") == "dumb"
