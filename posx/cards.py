"""What `posx list` and `posx show` say of a scheme, a task, an extension or a run."""

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch

from posx import build, catalog, cost, portrait
from posx.config import ModelConfig
from posx.display import out, print_fitting, print_pairs, print_text
from posx.errors import UserError
from posx.model import make_schemes, shortest_limit
from posx.progress import say
from posx.runs import EVAL_COLUMNS, TRAIN_COLUMNS, Run
from posx.schemes.base import HOOKS, Scheme, Site

EXAMPLE_LEN = 64  # training length at which parameters and limits are stated

# Columns that a narrow terminal shows of a run's tables; all of them are in the files.
MAIN = {
    "train": ("step", "loss", "token_acc", "tail_acc", "lr", "grad_norm", "tokens_per_s"),
    "eval": (
        *("extension", "length", "status", "verdict", "token_acc", "token_acc_lo", "token_acc_hi"),
        *("chance", "exact_match", "first_error", "acc_in", "acc_out", "skill", "loss", "seconds"),
    ),
}


def scheme_facts(path: Path, extra: Path | None = None) -> dict[str, str]:
    """Year, family, where position enters, parameters on model=tiny, and the length limit."""
    make = build.maker(build.load_yaml(path, extra))
    schemes = make_schemes(make, example_site())
    first = schemes[0]
    limit = shortest_limit(schemes)
    return {
        "year": catalog.source(catalog.card(path))[0],
        "family": type(first).__module__.rpartition(".")[2],
        "enters": first.enters,
        "relative": "yes" if all(scheme.relative for scheme in schemes) else "no",
        "parameters": str(sum(p.numel() for each in schemes for p in each.parameters())),
        "limit": "none" if limit is None else f"{limit} tokens",
    }


def example(path: Path, extra: Path | None) -> Scheme:
    """The scheme of a yaml at the first layer of model=tiny."""
    return build.make_scheme(build.load_yaml(path, extra), example_site())


def example_site() -> Site:
    tiny = example_model()
    return Site(tiny.d_model, tiny.n_heads, tiny.d_head, EXAMPLE_LEN, tiny.n_layers)


@cache
def example_model() -> ModelConfig:
    """The shape of model=tiny."""
    return ModelConfig(**build.load_plain(catalog.find("model", "tiny")))


def costs(files: dict[str, Path], extra: Path | None) -> list[dict[str, str]]:
    """What each scheme costs beside no positions, measured now; a row is said when it is there."""
    meter = cost.Meter(example_model())
    rows = []
    for number, (name, path) in enumerate(files.items(), 1):
        say(f"{number} of {len(files)}: {name}")
        found = meter.measure(build.maker(build.load_yaml(path, extra)))
        rows.append(
            {
                "name": name,
                f"training at {cost.TRAIN_LEN}": f"{found.train:.2f}x",
                f"evaluation at {cost.LONG}": _cell(found.long, ".2f", "x"),
                "memory there": _cell(found.mib, ".0f", " MiB"),
            }
        )
    return rows


def _cell(value: float | None, form: str, unit: str) -> str:
    return "beyond its limit" if value is None else f"{value:{form}}{unit}"


def choose_schemes(facts: dict[str, dict[str, str]], words: list[str]) -> list[str]:
    """The schemes whose facts match every key=value; a value may be a comma list.

    Raises:
        UserError: no such key, or no scheme has the value.
    """
    known = [*next(iter(facts.values())), "trainable"]
    names = list(facts)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            raise UserError(
                f"cannot choose schemes by {word!r}{catalog.nearest(key, known)}: write key=value "
                f"with {', '.join(known)}"
            )
        has = {
            name: _trainable(row) if key == "trainable" else row[key] for name, row in facts.items()
        }
        wanted = set(text.lower().split(","))
        if not wanted & set(has.values()):
            raise UserError(
                f"no scheme has {word}{catalog.nearest(text, has.values())}; there are: "
                f"{', '.join(sorted(set(has.values())))}"
            )
        names = [name for name in names if has[name] in wanted]
    if not names:
        raise UserError(f"no scheme has {' and '.join(words)}: leave one of them out")
    return names


def _trainable(row: dict[str, str]) -> str:
    return "no" if row["parameters"] == "0" else "yes"


def show_name(group: str, path: Path, extra: Path | None, plot: Path | None) -> None:
    """Card, documentation, keys with their defaults, and of a scheme its traits and portrait.

    Raises:
        UserError: what is not a scheme cannot be drawn.
    """
    node = build.load_plain(path)
    thing = build.locate({"name": path.stem, **node}) if "_target_" in node else None
    is_scheme = inspect.isclass(thing) and issubclass(thing, Scheme)
    facts = scheme_facts(path, extra) | _traits(example(path, extra)) if is_scheme else {}
    if plot is not None and not is_scheme:
        raise UserError(f"--plot draws a scheme: write scheme=NAME, not {group}={path.stem}")
    card = catalog.card(path)
    keys = path.read_text("utf-8").strip()

    console = out()
    console.print(f"{group}={path.stem}", style="bold")
    print_text(card)
    if thing is not None:
        console.print()
        print_text(inspect.getdoc(thing) or "")
    if facts:
        console.print()
        print_pairs(facts)
        print_text(f"(parameters and limit: model=tiny, train_len={EXAMPLE_LEN})")
    console.print()
    console.print(path, style="bold")
    console.print(keys.partition("\n")[2] if card else keys)
    if is_scheme:
        _show_portrait(path, extra, plot)


def _show_portrait(path: Path, extra: Path | None, plot: Path | None) -> None:
    """What the untrained scheme does, drawn on the terminal and, if asked for, into a file."""
    torch.manual_seed(0)  # of what it would train
    scheme = example(path, extra)
    n = min(2 * EXAMPLE_LEN, scheme.max_len or 2 * EXAMPLE_LEN)
    picture = portrait.portray(scheme, n)
    console = out()
    plain = portrait.ascii_locale(console.encoding)
    text = portrait.as_text(picture, console.width, plain, console.color_system is not None)
    if text:
        console.print()
        print_text(f"Untrained, on {n} tokens that are all alike: {picture.caption()}.")
        console.print()
        console.file.write(text + "\n")
    if plot is not None:
        portrait.save(picture, plot, f"scheme={path.stem}")
        say(f"wrote {plot}")


def _traits(scheme: Scheme) -> dict[str, str]:
    hooks = [hook for hook in HOOKS if scheme.overrides(hook)]
    return {
        "hooks": ", ".join(hooks) or "none",
        "length dependent": "yes" if scheme.length_dependent else "no",
        "key/value cache": "yes" if scheme.kv else "no",
    }


def show_run(run: Run) -> None:
    """Record, config, both tables, and what their columns mean."""
    record, config = run.record(), run.config_text().strip()
    tables = {"train": run.table("train"), "eval": run.table("eval")}
    meanings = {"train": TRAIN_COLUMNS, "eval": EVAL_COLUMNS}

    console = out()
    console.print(run.folder, style="bold")
    facts = {key: _fact(value) for key, value in record.items()}
    print_pairs({key: text for key, text in facts.items() if text})
    console.print()
    console.print("config.yaml", style="bold")
    console.print(config)
    for name, table in tables.items():
        console.print()
        console.print(f"{name}.csv", style="bold")
        if table.empty:
            console.print("no rows yet")
            continue
        rows = [{key: _short(value) for key, value in row.items()} for row in _shown(table)]
        hidden = print_fitting(rows, MAIN[name])
        if hidden:
            console.print()
            print_text(f"No room for {', '.join(hidden)}: pipe this, or read {name}.csv there.")
        if "reason" in hidden:
            print_pairs({f"{row['length']} tokens": row["reason"] for row in rows if row["reason"]})
        console.print()
        print_pairs({column: meanings[name][column] for column in rows[0]}, indent="  ")


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(part)}" for key, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _shown(table: Any) -> list[dict[str, Any]]:
    """Rows without the columns that are the same for the whole run."""
    same = ("scheme", "task", "seed", "train_len", "computes")
    return table.drop(columns=[column for column in same if column in table]).to_dict("records")


def _short(value: Any) -> str:
    if value is None or value != value:  # an empty cell is NaN
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
