"""What `posx list` and `posx show` say of a scheme, a task, an extension or a run."""

import inspect
from pathlib import Path
from typing import Any

from posx import build, catalog
from posx.config import ModelConfig
from posx.display import out, print_rows
from posx.runs import EVAL_COLUMNS, TRAIN_COLUMNS, Run
from posx.schemes.base import Scheme, Site

HOOKS = (
    "positions", "embed", "prepare", "scores", "mask", "value", "normalize", "fold", "distance_bias"
)  # fmt: skip
EXAMPLE_LEN = 64  # training length at which parameters and limits are stated


def scheme_facts(path: Path) -> dict[str, str]:
    """Family, where position enters, parameters on model=tiny, and the length limit."""
    node = build.load_yaml(path)
    tiny = example_model()
    first = build.make_scheme(node, Site(tiny.d_model, tiny.n_heads, tiny.d_head, EXAMPLE_LEN))
    count = sum(p.numel() for p in first.parameters())
    return {
        "family": node["_target_"].split(".")[-2],
        "enters": first.enters,
        "parameters": str(count if first.shared else count * tiny.n_layers),
        "limit": "none" if first.max_len is None else f"{first.max_len} tokens",
    }


def example_model() -> ModelConfig:
    """The shape of model=tiny."""
    return ModelConfig(**build.load_plain(catalog.find("model", "tiny")))


def show_name(group: str, path: Path) -> None:
    """Card, documentation, keys with their defaults, and the traits of a scheme."""
    console = out()
    console.print(f"{group}={path.stem}", style="bold")
    console.print(catalog.card(path))
    node = build.load_plain(path)
    if "_target_" in node:
        thing = build.locate({"name": path.stem, **node})
        console.print()
        console.print(inspect.getdoc(thing) or "")
        if inspect.isclass(thing) and issubclass(thing, Scheme):
            console.print()
            facts = scheme_facts(path) | _traits(thing)
            for key, value in facts.items():
                console.print(f"{key:18}{value}")
    console.print()
    console.print(path.read_text("utf-8").strip())


def _traits(scheme: type[Scheme]) -> dict[str, str]:
    hooks = [hook for hook in HOOKS if getattr(scheme, hook) is not getattr(Scheme, hook)]
    return {
        "hooks": ", ".join(hooks) or "none",
        "relative": "yes" if scheme.relative else "no",
        "length dependent": "yes" if scheme.length_dependent else "no",
        "key/value cache": "yes" if scheme.kv else "no",
    }


def show_run(run: Run) -> None:
    """Record, config, both tables, and what their columns mean."""
    console = out()
    record = run.record()
    console.print(str(run.folder), style="bold")
    for key, value in record.items():
        console.print(f"{key:18}{value}")
    console.print()
    console.print(run.config_text().strip())
    for name, meanings in (("train", TRAIN_COLUMNS), ("eval", EVAL_COLUMNS)):
        table = run.table(name)
        console.print()
        console.print(f"{name}.csv", style="bold")
        if table.empty:
            console.print("no rows yet")
            continue
        print_rows([{key: _short(value) for key, value in row.items()} for row in _shown(table)])
        for column, meaning in meanings.items():
            console.print(f"  {column:18}{meaning}")


def _shown(table: Any) -> list[dict[str, Any]]:
    """Rows without the columns that are the same for the whole run."""
    same = ("scheme", "task", "seed", "train_len", "computes")
    return table.drop(columns=[column for column in same if column in table]).to_dict("records")


def _short(value: Any) -> str:
    if value != value:  # NaN: an empty cell
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
