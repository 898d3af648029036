"""A picture of a report: the metric against length, one panel a (task, train_len)."""

import io
import math
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd

from posx.collect import SHARES, WITH_CHANCE, Collected
from posx.errors import UserError
from posx.runs import write_atomic
from posx.summary import cells, curve_name, evaluations

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's palette, told apart with any colour vision; the yellow is left out on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vP*<>Xph8"
_DASHES = ("-", "--", "-.")


def draw(data: Collected, path: Path, metric: str = "token_acc") -> None:
    """Draw the metric against length, one panel a (task, train_len), one line a curve.

    Raises:
        UserError: the suffix is none of png, svg and pdf; matplotlib is missing; nothing to draw.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"cannot draw {path}: the name must end in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("posx report --plot needs matplotlib: pip install 'posx[plot]'") from None
    if data.rows.empty:
        raise UserError("there is nothing to draw: no run here is evaluated, see `posx eval`")
    table = cells(evaluations(data, metric), metric)
    table["name"] = [_plot_name(curve) for curve in table.to_dict("records")]
    panels = sorted(set(zip(table["task"], table["train_len"], strict=True)))
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    names = sorted(set(table["name"]))
    legend_columns = math.ceil(len(names) / (16 * lines))
    figure = Figure(
        figsize=(5 * columns + 2.2 * legend_columns, 3.8 * lines), dpi=150, layout="constrained"
    )
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (task, train_len) in zip(axes, panels, strict=False):
        part = table[(table["task"] == task) & (table["train_len"] == train_len)]
        _panel(axis, part, names, train_len, metric)
        axis.set_title(f"{task}, train_len {train_len}", fontsize="medium")
    for axis in axes[len(panels) :]:
        axis.remove()
    _legend(figure, names, legend_columns, metric)
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower())
    write_atomic(path, lambda file: file.write(image.getbuffer()))


def _plot_name(curve: dict[str, Any]) -> str:
    return curve_name(curve) if curve["trained"] else f"{curve_name(curve)} (untrained)"


def _style(names: list[str], name: str) -> dict[str, Any]:
    """A colour, marker and dash that belong to a name in all panels."""
    index = names.index(name)
    faded = {"alpha": 0.45} if name.endswith(" (untrained)") else {}
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
        "markersize": 4.5,
        "linewidth": 1.4,
        **faded,
    }


def _panel(axis: Any, table: pd.DataFrame, names: list[str], train_len: int, metric: str) -> None:
    """The curves of one task and training length."""
    axis.set_xscale("log", base=2)
    axis.axvline(train_len, color="0.6", linewidth=1, zorder=0)
    crossed = 0
    for name in sorted(set(table["name"])):
        curve = table[table["name"] == name]
        style = _style(names, name)
        good = curve[curve["n_computing"] > 0]
        axis.plot(good["length"], good["mean"], **style)
        band = good.dropna(subset=["min", "max"])
        axis.fill_between(
            band["length"], band["min"], band["max"], color=style["color"], alpha=0.15, linewidth=0
        )
        gone = curve.loc[curve["n_computing"] == 0, "length"]
        if len(gone):
            _crosses(axis, gone, style["color"], height=0.03 * crossed)
            crossed += 1  # the next ones stand higher, so that they do not hide these
    if metric in WITH_CHANCE:
        chance = table.groupby("length")["chance"].mean()
        axis.plot(chance.index, chance, color="0.5", linestyle="--", linewidth=1, zorder=0)
    _axes(axis, sorted(set(table["length"])), train_len, metric)


def _crosses(axis: Any, lengths: pd.Series, colour: str, height: float) -> None:
    """Mark lengths at the x axis, or a share of the panel's height above it."""
    axis.plot(
        lengths,
        [height] * len(lengths),
        color=colour,
        marker="x",
        markersize=5,
        linestyle="none",
        transform=axis.get_xaxis_transform(),
        clip_on=False,
    )


def _axes(axis: Any, lengths: list[int], train_len: int, metric: str) -> None:
    shown = _ticks(lengths, train_len)
    axis.set_xticks(shown, [f"{at}\n{at / train_len:.4g}x" for at in shown], fontsize="x-small")
    axis.set_xticks(lengths, [""] * len(lengths), minor=True)
    axis.set_xlabel("length in tokens, times train_len", fontsize="small")
    axis.set_ylabel(metric, fontsize="small")
    axis.tick_params(axis="y", labelsize="small")
    axis.spines[["top", "right"]].set_visible(False)
    if metric in SHARES:
        axis.set_ylim(-0.03, 1.03)


def _ticks(lengths: list[int], train_len: int) -> list[int]:
    """The lengths that have room for a label: train_len, and those most of an octave apart."""
    shown = [train_len]
    for length in lengths:
        if all(abs(math.log2(length / other)) >= 0.9 for other in shown):
            shown.append(length)
    return sorted(shown)


def _legend(figure: Any, names: list[str], columns: int, metric: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_style(names, name)) for name in names]
    # A dollar sign would start mathematics, and a leading underscore hide the entry.
    labels = [_wrapped(name).replace("$", r"\$") for name in names]
    labels = [f" {label}" if label.startswith("_") else label for label in labels]
    if metric in WITH_CHANCE:
        handles.append(Line2D([], [], color="0.5", linestyle="--", linewidth=1))
        labels.append("chance")
    handles.append(Line2D([], [], color="0.6", linewidth=1))
    labels.append("train_len")
    handles.append(Line2D([], [], color="0.3", marker="x", linestyle="none", markersize=5))
    labels.append("does not compute")
    figure.legend(
        handles,
        labels,
        loc="outside right upper",
        ncols=columns,
        fontsize="small",
        frameon=False,
        title="mean over seeds, band min-max",
        title_fontsize="small",
    )


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 28, break_long_words=False, break_on_hyphens=False))
