"""The operator's kill switch: with ``EAGLE_MRV2_DISABLE=1`` stock vLLM drafts instead of ``eagle_mrv2``.

Only the method is translated.  This needs neither a supported vLLM release nor valid options.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.method import translate
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.errors import EagleMRV2Error

VARIABLE = "EAGLE_MRV2_DISABLE"
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off", "")


def is_on() -> bool:
    """Whether the operator has switched ``eagle_mrv2`` off.

    Raises:
        EagleMRV2Error: the value is neither on nor off.
    """
    value = os.environ.get(VARIABLE, "")
    word = value.strip().lower()
    if word not in (*_ON, *_OFF):
        raise EagleMRV2Error(
            f"{VARIABLE}={value!r} is neither on nor off; set it to 1 for stock vLLM's own method, "
            f"or unset it for {METHOD}."
        )
    return word in _ON


def stock_config(speculative_config: Mapping[str, Any], target: str, reader: Reader) -> dict[str, Any]:
    """The same speculative configuration with the stock method and the same head; logs one WARNING.

    Args:
        speculative_config: the user's configuration, with ``eagle_mrv2`` as method.
        target: path or hub name of the target model.
        reader: reads configurations with the options that vLLM was given.

    Raises:
        EagleMRV2Error: as for `translate`.
    """
    translated, settings = translate(speculative_config, target, Options(), reader)
    _announce(settings.family)
    return translated


@functools.cache
def _announce(family: str) -> None:
    logging.getLogger("vllm.eagle_mrv2").warning(
        "%s=%s: %s is off, and stock vLLM drafts with method=%s and the same head",
        VARIABLE,
        os.environ[VARIABLE],
        METHOD,
        family,
    )
