"""The command line. Bodies import what they need, so that --help stays light."""

import errno
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from posx.errors import RunFailed, UserError
from posx.paths import RESULTS_VARIABLE, results_dir


class Group(TyperGroup):
    """Mistakes of the user end as one line on stderr: exit code 2, or 1 where a run failed."""

    def main(self, *arguments: Any, **extra: Any) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # what a terminal cannot show becomes a ?
        try:
            code = super().main(*arguments, **extra | {"standalone_mode": False})
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # What is still buffered goes nowhere, or the interpreter's own flush would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = _refuse(f"cannot write the output ({error.strerror})", 1)
        except Exception as error:
            if not hasattr(error, "format_message"):  # what Typer's and Click's own have in common
                raise
            code = _refuse(_usage(error), getattr(error, "exit_code", 2))
        raise SystemExit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, so that an error of it is seen
        except (UserError, RunFailed) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exception(error)
            raise typer.Exit(_refuse(str(error), error.code)) from None
        except KeyboardInterrupt:
            raise typer.Exit(_refuse("stopped; all that was written is kept", 130)) from None
        return result


def _refuse(text: str, code: int) -> int:
    print(f"posx: {text}", file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    """An error of the parser as one line."""
    context = getattr(error, "ctx", None)
    command = "posx" if context is None or context.parent is None else f"posx {context.info_name}"
    text = " ".join(error.format_message().split()).rstrip(".")
    return f"{text[:1].lower()}{text[1:]}; see `{command} --help`"


class HydraCommand(TyperCommand):
    """A command whose words go to Hydra as they were typed, but for its own options; Typer would
    sort them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_a_word = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            for name in option.opts
            if name.startswith("-")
        }
        words, own = [], False
        for word in args:
            name, equals, _ = word.partition("=")
            if not own and name not in takes_a_word:
                words.append(word)
            own = not own and not equals and takes_a_word.get(name, False)
        ctx.meta["posx.words"] = words
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Group,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN | key=value", help="Run folders, or filters such as scheme=rope,alibi"
    ),
]
ResultsDir = Annotated[
    Path, typer.Option("--results-dir", envvar=RESULTS_VARIABLE, help="Where runs are kept.")
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        exists=True,
        file_okay=False,
        help="A folder of your own yaml files: scheme/mine.yaml, ...",
    ),
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
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Positional schemes at lengths never trained: where do they compute, and where do they
    perform?

    \b
    posx train scheme=rope
    posx eval --lengths 512,2048,8192
    posx report
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command(
    cls=HydraCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="All keys: posx train --cfg job. All names: posx list scheme.",
)
def train(
    ctx: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="key=value", help="Config keys, and Hydra's own flags."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Jobs of a sweep at a time. Default: one a usable core."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what there is to do, and how long it takes.")
    ] = False,
) -> None:
    """Train one run, or a sweep with -m.

    A finished run is not trained again; an interrupted one goes on with the same command, and a
    sweep with what is missing. Whole studies: posx list experiment.

    \b
    posx train scheme=rope task=sort seed=1
    posx train -m scheme=rope,alibi seed=0,1,2 --jobs 2
    posx train -m scheme=rope,alibi eval.lengths=[128,512]
    posx train -m +experiment=blog --dry-run
    posx train -m +experiment=blog hydra/launcher=slurm
    posx train init=RUN train_len=256
    posx train scheme=mine --config-dir my_configs
    """
    from posx import commands

    commands.train(ctx.meta["posx.words"], jobs, dry_run)


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
    """Evaluate trained runs at any length.

    First whether each computes there, then how well it performs. All finished runs when none is
    named; cells that are there already are kept.

    \b
    posx eval --lengths 512,2048,8192
    posx eval scheme=rope,alibi task=sort --lengths 8x
    posx eval --lengths 512 --extend yarn,ntk
    """
    from posx import commands

    commands.evaluate(
        words or [],
        results,
        lengths,
        _names(extend),
        tuple(trust or ()),
        config_dir,
        again,
        max_memory=max_memory,
        max_seconds=max_seconds,
        sequences=sequences,
        seed=eval_seed,
        generate=generate,
    )


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
    """Compare runs: how far each computes and performs.

    Tables of accuracy against length, over seeds; of all runs when none is named.

    \b
    posx report
    posx report task=copy --format csv --output copy.csv
    posx report --metric exact_match --plot curves.png
    """
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
    group: Annotated[
        str,
        typer.Argument(
            metavar="GROUP",
            help="scheme | extension | task | model | optim | experiment | run",
            show_default=False,
        ),
    ],
    words: Words = None,
    fmt: Annotated[str, typer.Option("--format", help="table | csv | md")] = "table",
    sort: Annotated[
        str | None,
        typer.Option(help="Columns to sort by, most important first; -COLUMN for descending."),
    ] = None,
    cost: Annotated[
        bool,
        typer.Option("--cost", help="Measure schemes beside no positions: time and memory."),
    ] = False,
    config_dir: ConfigDir = None,
    results: ResultsDir = RESULTS,
) -> None:
    """One line for each scheme, extension, task, experiment or run.

    Schemes by family, year, enters, relative, trainable, ...; runs by scheme, task, seed, ...

    \b
    posx list scheme
    posx list scheme family=bias trainable=yes
    posx list scheme family=bias --cost
    posx list run task=copy converged=yes --sort train_len,-accuracy
    """
    from posx import commands

    commands.list_names(group, words or [], results, config_dir, cost, _names(sort), fmt)


@app.command()
def show(
    what: Annotated[
        str, typer.Argument(metavar="scheme=NAME | RUN", help="A name or a run folder.")
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Draw the scheme: FILE.png, .svg or .pdf")
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """The card of a scheme, or all about a run.

    Of a scheme its formula, source, keys and limit, and a picture of what it does to scores over
    distance or of its mask; also of a task or an extension. Of a run its config and tables, and
    what their columns mean.

    \b
    posx show scheme=rope
    posx show scheme=alibi --plot alibi.png
    posx show extension=yarn
    posx show results/runs/copy/rope/seed0-1a2b3c4d
    """
    from posx import commands

    commands.show(what, config_dir, plot)


@app.command()
def check(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="scheme=NAME extension=NAME", help="All schemes when none is named."
        ),
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Test a scheme, yours or ours, against its contract.

    Shapes, causality, cached decoding, gradients, half precision, agreement of all attention
    paths, ... Exit code 1 when a check fails.

    \b
    posx check scheme=rope
    posx check scheme=rope extension=yarn
    posx check scheme=mine --config-dir my_configs
    """
    from posx import commands

    commands.check(words or [], config_dir)


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]
