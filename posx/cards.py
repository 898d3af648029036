"""What `posx list` and `posx show` say of a scheme, a task, an extension or a run."""

import inspect
from pathlib import Path
from typing import Any

from posx import build, catalog
from posx.config import ModelConfig
from posx.display import out, print_fitting, print_pairs, print_text
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


def scheme_facts(path: Path) -> dict[str, str]:
    """Family, where position enters, parameters on model=tiny, and the length limit."""
    tiny, first = example_model(), example(path)
    count = sum(p.numel() for p in first.parameters())
    return {
        "family": type(first).__module__.rpartition(".")[2],
        "enters": first.enters,
        "parameters": str(count if first.shared else count * tiny.n_layers),
        "limit": "none" if first.max_len is None else f"{first.max_len} tokens",
    }


def example(path: Path) -> Scheme:
    """The scheme of a yaml at the first layer of model=tiny."""
    tiny = example_model()
    site = Site(tiny.d_model, tiny.n_heads, tiny.d_head, EXAMPLE_LEN, tiny.n_layers)
    return build.make_scheme(build.load_yaml(path, path.parents[1]), site)


def example_model() -> ModelConfig:
    """The shape of model=tiny."""
    return ModelConfig(**build.load_plain(catalog.find("model", "tiny")))


def show_name(group: str, path: Path) -> None:
    """Card, documentation, keys with their defaults, and the traits of a scheme."""
    node = build.load_plain(path)
    thing = build.locate({"name": path.stem, **node}) if "_target_" in node else None
    is_scheme = inspect.isclass(thing) and issubclass(thing, Scheme)
    facts = scheme_facts(path) | _traits(example(path)) if is_scheme else {}
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


def _traits(scheme: Scheme) -> dict[str, str]:
    hooks = [hook for hook in HOOKS if scheme.overrides(hook)]
    return {
        "hooks": ", ".join(hooks) or "none",
        "relative": "yes" if scheme.relative else "no",
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
