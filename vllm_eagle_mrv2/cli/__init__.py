"""The command ``vllm-eagle-mrv2``, with a folder or file for each subcommand, and one for what several share.

``--help`` never imports vLLM.
"""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.cli.bench.command import bench as bench_command
from vllm_eagle_mrv2.cli.bench_load.command import bench_load
from vllm_eagle_mrv2.cli.common.list_options import ListOptionsCommand
from vllm_eagle_mrv2.cli.demo.command import demo as demo_command
from vllm_eagle_mrv2.cli.doctor.command import doctor as doctor_command
from vllm_eagle_mrv2.cli.rank_vocab import rank_vocab
from vllm_eagle_mrv2.cli.tune.command import tune

app = typer.Typer(
    help="EAGLE drafting for vLLM's Model Runner V2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo_command)
app.command()(doctor_command)
app.command(cls=ListOptionsCommand)(bench_command)
app.command(cls=ListOptionsCommand)(bench_load)
app.command(cls=ListOptionsCommand)(tune)
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
