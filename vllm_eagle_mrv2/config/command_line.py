"""Teaches the parser of vLLM's command line the method ``eagle_mrv2``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from vllm_eagle_mrv2.config.method import canonical, is_ours, names, parse_short_form
from vllm_eagle_mrv2.errors import EagleMRV2Error


def teach_parser(parser: argparse.ArgumentParser) -> None:
    """Let a vLLM argument parser accept the method in its short form and, if it has it, in ``--spec-method``."""
    for action in parser._actions:
        if "--speculative-config" in action.option_strings and action.type is not None:
            action.type = _short_form_first(action.type)  # type: ignore[arg-type]
        elif "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, *(name for name in names() if name not in action.choices)]
            action.type = lambda name: canonical(name) if is_ours(name) else name


def _short_form_first(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(parse)
    def parsed(text: str) -> Any:
        try:
            short = parse_short_form(text)
        except EagleMRV2Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return parse(text) if short is None else short

    return parsed
