"""The command ``vllm-eagle-mrv2``: one file a subcommand.  Nothing here imports vLLM, so that ``--help`` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.cli.bench import bench
from vllm_eagle_mrv2.cli.demo import demo
from vllm_eagle_mrv2.cli.doctor import doctor
from vllm_eagle_mrv2.cli.list_options import ListOptionsCommand
from vllm_eagle_mrv2.cli.rank_vocab import rank_vocab

app = typer.Typer(
    help="EAGLE drafting for vLLM's Model Runner V2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(doctor)
app.command(cls=ListOptionsCommand)(bench)
app.command()(rank_vocab)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """EAGLE drafting for vLLM's Model Runner V2."""
