"""Absolute positions: a vector u(p) for each position p, added once to the token embeddings.

    x_p + u(p)        hook: embed

Attention sees the sum through its learned projections, so scores need not depend on i - j alone.
The extensions of the learned table stand at the end.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.base import Scheme, Site

LAYOUTS = ("interleaved", "half")
SPREADS = ("vaswani", "t2t")


def sinusoids(
    pos: Tensor,
    d_model: int,
    base: float,
    exponent_sign: int,
    layout: str = "interleaved",
    spread: str = "vaswani",
) -> Tensor:
    """sin and cos of p * base^(sign * e_c) in columns 2c and 2c + 1, or all sines before all
    cosines when the layout is `half`.

    e_c is 2c / d_model, or c / (n - 1) for the n = d_model // 2 pairs of the spread `t2t`.
    pos: (T,) or (B, T) -> (T, E) or (B, T, E), float64. An odd width has one sine more than
    cosines; with t2t its last column is zero.
    """
    pairs = d_model // 2 if spread == "t2t" else (d_model + 1) // 2
    pair = torch.arange(pairs, dtype=torch.float64, device=pos.device)
    exponent = pair / max(pairs - 1, 1) if spread == "t2t" else 2 * pair / d_model
    angle = pos.double()[..., None] * base ** (exponent_sign * exponent)  # (T, pairs)
    parts = angle.sin(), angle.cos()
    table = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
    return F.pad(table, (0, d_model - table.shape[-1]))  # cuts or fills the column of an odd width


class Sinusoidal(Scheme):
    """u(p)_2c = sin(p w_c), u(p)_2c+1 = cos(p w_c), w_c = base^(-2c / d_model).

    Vaswani et al. 2017 (arXiv:1706.03762). u(p + D) = A(D) u(p) with A a rotation of every pair, so
    the next positions are linear functions of this one. The formula has no longest length; beyond
    the training length the slow pairs reach phases that the model has never seen. No parameters.
    `exponent_sign` +1 makes the frequencies rise with the column instead of fall. Marian and the
    paper's own code, tensor2tensor, have all sines before all cosines (layout=half), another order
    of the same columns. tensor2tensor and fairseq also spread the pairs otherwise (spread=t2t): of
    n = d_model // 2 pairs the last has w = 1 / base exactly, w_c = base^(-c / (n - 1)).
    """

    enters = "input"

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        exponent_sign: int = -1,
        layout: str = "interleaved",
        spread: str = "vaswani",
    ) -> None:
        super().__init__(site)
        if base <= 1:
            raise UserError(f"sinusoidal: base is {base}; it must be above 1, the paper has 10000")
        if exponent_sign not in (-1, 1):
            raise UserError(
                f"sinusoidal: exponent_sign is {exponent_sign}; use -1, as the paper, or 1 for "
                "frequencies that rise with the column"
            )
        if layout not in LAYOUTS:
            raise UserError(
                f"sinusoidal: layout {layout!r} is not known: use {' or '.join(LAYOUTS)}"
            )
        if spread not in SPREADS:
            raise UserError(
                f"sinusoidal: spread {spread!r} is not known: use {' or '.join(SPREADS)}"
            )
        self.base = base
        self.exponent_sign = exponent_sign
        self.layout = layout
        self.spread = spread

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        _check_input("sinusoidal", x, self.site.d_model)
        table = sinusoids(
            pos, self.site.d_model, self.base, self.exponent_sign, self.layout, self.spread
        )  # (T, E)
        return x + table.to(x)


class Learned(Scheme):
    """u(p) = row p of a trained table with `max_len` rows (None: the training length).

    Gehring et al. 2017 (arXiv:1705.03122), the form of GPT-2. A position beyond the table is an
    error; rows beyond the training length exist when max_len is larger, but nothing trains them.
    One table for the model: max_len * d_model parameters.
    """

    enters = "input"
    shared = True

    def __init__(self, site: Site, max_len: int | None = None, init_std: float = 0.3) -> None:
        super().__init__(site)
        rows = site.train_len if max_len is None else max_len
        if rows < 1:
            raise UserError(f"learned: max_len is {rows}; it must be at least 1")
        self.max_len = rows
        self.table = nn.Parameter(torch.empty(rows, site.d_model))
        nn.init.normal_(self.table, std=init_std)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        _check_input("learned", x, self.site.d_model)
        length = int(pos.max()) + 1
        rows = len(self.table)
        if length > rows:
            raise UserError(
                f"learned: length {length} is beyond max_len {rows}, the table has no row for "
                f"position {length - 1}: evaluate with --extend interpolate, clip or wrap, or "
                f"train with scheme.max_len={length}"
            )
        return x + self.table[pos]


def _check_input(name: str, x: Tensor, d_model: int) -> None:
    """Refuse embeddings that the positions would only fit by accident of broadcasting.

    Raises:
        UserError: x is not (B, T, d_model).
    """
    if x.ndim != 3:
        raise UserError(
            f"{name}: embeddings have shape {tuple(x.shape)}; expected three axes (batch, length, "
            f"d_model={d_model})"
        )
    if x.shape[-1] != d_model:
        raise UserError(
            f"{name}: embeddings are {x.shape[-1]} wide; the scheme was built for d_model={d_model}"
        )


# -- extensions ----------------------------------------------------------------------------------


def interpolate(scheme: Learned, length: int) -> Learned:
    """Resample the table linearly to `length` rows: position p reads row p (L - 1) / (length - 1).

    L counts the rows that training reached. The first and the last of them stay the ends
    (align_corners), as for vision tables in Dosovitskiy et al. 2020 (arXiv:2010.11929). All steps
    shrink, those of short distances too. A table that is long enough stays as it is.
    """
    if length <= len(scheme.table):
        return copy.deepcopy(scheme)
    columns = _trained_rows(scheme).T[None]  # (1, E, L)
    longer = F.interpolate(columns, size=length, mode="linear", align_corners=True)
    return _with_table(scheme, longer[0].T)


def clip(scheme: Learned, length: int) -> Learned:
    """Give every position beyond the last one that training reached its row, so that they cannot
    be told apart. A table that is long enough stays as it is.
    """
    if length <= len(scheme.table):
        return copy.deepcopy(scheme)
    rows = _trained_rows(scheme)  # (L, E)
    position = torch.arange(length, device=rows.device).clamp(max=len(rows) - 1)
    return _with_table(scheme, rows[position])


def wrap(scheme: Learned, length: int) -> Learned:
    """Start the table again after the L rows that training reached: position p reads row p mod L.

    Neighbours stay neighbours except at the seams; positions that are L apart cannot be told apart.
    A table that is long enough stays as it is.
    """
    if length <= len(scheme.table):
        return copy.deepcopy(scheme)
    rows = _trained_rows(scheme)  # (L, E)
    return _with_table(scheme, rows[torch.arange(length, device=rows.device) % len(rows)])


def _trained_rows(scheme: Learned) -> Tensor:
    """The rows of the table that training reached: (L, E). Later ones are as they were drawn."""
    return scheme.table.detach()[: scheme.site.positions]


def _with_table(scheme: Learned, table: Tensor) -> Learned:
    """A copy of the scheme with another table. table: (L, E)."""
    changed = copy.deepcopy(scheme)
    changed.table = nn.Parameter(table.contiguous(), requires_grad=scheme.table.requires_grad)
    changed.max_len = len(table)
    return changed
