"""The command line. Bodies import what they need, so that --help stays light."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

app = typer.Typer(
    name="posx",
    help="Train tiny Transformers with any positional scheme, and see at which lengths they compute "
    "and at which they perform.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("posx"))
        raise typer.Exit


@app.callback()
def posx(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    pass


class HydraCommand(TyperCommand):
    """A command whose words go to Hydra as they were typed; Typer would sort options from arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["posx.words"] = list(args)
        return super().parse_args(ctx, args)


@app.command(
    cls=HydraCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Keys: posx train --cfg job. Names: posx list scheme.",
)
def train(
    ctx: typer.Context,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, and Hydra's flags", metavar="[key=value]...")
    ] = None,
) -> None:
    """Train one run, or a sweep with -m.

    posx train scheme=rope task=sort seed=1
    posx train -m scheme=rope,alibi seed=0,1,2
    posx train scheme=mine --config-dir my_configs
    """
    from posx import commands

    commands.train(ctx.meta["posx.words"])


def main() -> None:
    """Run the command line; mistakes of the user end as one line on stderr."""
    import sys

    from posx.errors import UserError

    try:
        app(standalone_mode=True)
    except UserError as error:
        print(f"posx: {error}", file=sys.stderr)
        raise SystemExit(2) from None
