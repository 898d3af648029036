"""The command line. Bodies import what they need, so that --help stays light."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from posx.errors import UserError
from posx.paths import RESULTS_VARIABLE, results_dir


class Group(TyperGroup):
    """Mistakes of the user end as one line on stderr: exit code 2, or 1 where a run failed."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            print(f"posx: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except BrokenPipeError:  # `posx report | head`
            sys.stderr.close()
            raise SystemExit(0) from None


class HydraCommand(TyperCommand):
    """A command whose words go to Hydra as they were typed; Typer would sort options from arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["posx.words"] = list(args)
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN | key=value]...", help="Run folders, or filters: scheme=rope,alibi"
    ),
]
ResultsDir = Annotated[
    Path, typer.Option("--results-dir", envvar=RESULTS_VARIABLE, help="Where runs are kept.")
]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", help="A folder of your own yaml files.")
]
Trust = Annotated[
    list[str] | None,
    typer.Option("--trust", help="A package that saved configs may name besides posx."),
]
RESULTS = results_dir()


def print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("posx"))
        raise typer.Exit


@app.callback()
def posx(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Positional schemes at lengths never trained: where do they compute, and where do they perform?

    posx train scheme=rope; posx eval --lengths 512,2048,8192; posx report
    """


@app.command(
    cls=HydraCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="All keys: posx train --cfg job. All names: posx list scheme.",
)
def train(
    ctx: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="Config keys, and Hydra's own flags."),
    ] = None,
) -> None:
    """Train one run, or a sweep with -m. A finished run is not trained again, a broken one goes on.

    posx train scheme=rope task=sort seed=1
    | posx train -m scheme=rope,alibi seed=0,1,2
    | posx train scheme=mine --config-dir my_configs
    """
    from posx import commands

    try:
        commands.train(ctx.meta["posx.words"])
    except commands.RunFailed as error:
        print(f"posx: {error}", file=sys.stderr)
        raise SystemExit(error.code) from None


@app.command("eval")
def evaluate(
    words: Words = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens: 512,2048 or 64..8192 (doubling) or 8x (of train_len). Default: "
            "1x to 128x of train_len, as far as the task can go."
        ),
    ] = None,
    extend: Annotated[
        str | None, typer.Option(help="Training-free extensions, such as yarn,ntk.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Also run free, for accuracy after the first error.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Redo cells that are there.")] = False,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences a length, instead of 4,000 tokens' worth.")
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option(min=1, help="MiB a cell; default: what is free.")
    ] = None,
    max_seconds: Annotated[float, typer.Option(min=1, help="Seconds a cell.")] = 600.0,
    eval_seed: Annotated[int, typer.Option(min=0, help="Of the evaluation sequences.")] = 0,
    trust: Trust = None,
    config_dir: ConfigDir = None,
    results: ResultsDir = RESULTS,
) -> None:
    """Evaluate trained runs at any length: first whether they compute, then how well they perform.

    posx eval --lengths 512,2048,8192
    | posx eval scheme=rope,alibi task=sort --lengths 8x
    | posx eval --lengths 512 --extend yarn,ntk
    """
    from posx import commands

    try:
        commands.evaluate(
            words or [],
            results,
            lengths,
            [] if extend is None else [name.strip() for name in extend.split(",")],
            tuple(trust or ()),
            config_dir,
            again,
            max_memory=max_memory,
            max_seconds=max_seconds,
            sequences=sequences,
            seed=eval_seed,
            generate=generate,
        )
    except commands.RunFailed as error:
        print(f"posx: {error}", file=sys.stderr)
        raise SystemExit(error.code) from None


@app.command()
def report(
    words: Words = None,
    metric: Annotated[str, typer.Option(help="A numeric column of eval.csv.")] = "token_acc",
    task: Annotated[str | None, typer.Option(help="Tasks, such as copy,sort.")] = None,
    scheme: Annotated[str | None, typer.Option(help="Schemes, such as rope,alibi.")] = None,
    fmt: Annotated[
        str, typer.Option("--format", help="table | csv | md | latex | json | html")
    ] = "table",
    output: Annotated[Path | None, typer.Option(help="A file instead of stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw curves: FILE.png, .svg or .pdf")] = None,
    results: ResultsDir = RESULTS,
) -> None:
    """Compare all runs: accuracy against length, and how far each computes and performs."""
    from posx import commands

    commands.report(
        words or [],
        results,
        metric=metric,
        tasks=_names(task),
        schemes=_names(scheme),
        fmt=fmt,
        output=output,
        plot=plot,
    )


@app.command("list")
def list_names(
    group: Annotated[str, typer.Argument(help="scheme | extension | task | model | optim | run")],
    words: Words = None,
    config_dir: ConfigDir = None,
    results: ResultsDir = RESULTS,
) -> None:
    """One line for each scheme, extension, task or run."""
    from posx import commands

    commands.list_names(group, words or [], results, config_dir)


@app.command()
def show(
    what: Annotated[
        str, typer.Argument(metavar="scheme=NAME | RUN", help="A name or a run folder.")
    ],
    config_dir: ConfigDir = None,
) -> None:
    """The card of a scheme (formula, source, limit), or the config and tables of a run."""
    from posx import commands

    commands.show(what, config_dir)


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]
