"""What a host is: the knowledge of one series of vLLM releases, as a pluggy plugin.

The maintainer of a fork ships a host of their own through the entry-point group ``vllm_eagle_mrv2.hosts``; where it
covers a release that one of ours covers too, theirs comes first.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import pluggy
from packaging.specifiers import SpecifierSet

from vllm_eagle_mrv2.behaviours import Behaviour
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.method import FAMILIES, METHOD, Family, Request
from vllm_eagle_mrv2.surface import Symbol

PROJECT = "vllm_eagle_mrv2"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Host:
    """One series of vLLM releases, as data; its speculators are imported only when one is made."""

    name: str
    series: str
    """The releases that it covers, for a person: ``0.26.x``."""
    releases: SpecifierSet
    symbols: tuple[Symbol, ...]
    """Every symbol of vLLM's private modules that the host relies on."""
    stock: frozenset[Behaviour]
    """Behaviours that the release's own speculator has as well."""
    speculators: str
    """Module with ``speculator_class(family)``; importing it imports vLLM's private modules."""
    families: tuple[Family, ...] = FAMILIES
    eagle3_over_pp: bool = False
    """Whether EAGLE-3 runs under pipeline parallelism on these releases."""

    def check_request(self, request: Request, engine_args: Any) -> None:
        """Refuse what cannot run on this host.

        Args:
            request: what was asked for.
            engine_args: vLLM's ``EngineArgs``.

        Raises:
            EagleMRV2Error: with the cause and the remedy.
        """
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower() in ("0", "false"):
            raise EagleMRV2Error(
                f"method={METHOD} runs on Model Runner V2, which VLLM_USE_V2_MODEL_RUNNER=0 forbids; unset it."
            )
        if request.family not in self.families:
            raise EagleMRV2Error(
                f"method={METHOD} does not support the family {request.family} on this vLLM release; "
                f"use method={request.family}."
            )
        stages = getattr(engine_args, "pipeline_parallel_size", 1)
        if request.family == "eagle3" and stages > 1 and not self.eagle3_over_pp:
            raise EagleMRV2Error(
                f"EAGLE-3 does not run with pipeline_parallel_size={stages} on this vLLM release; "
                "use tensor parallelism, or an EAGLE-1 head."
            )

    def make_speculator(self, vllm_config: Any, device: Any, request: Request) -> Any:
        """Our speculator for a marked configuration, a subclass of the release's own."""
        module = importlib.import_module(self.speculators)
        return module.speculator_class(request.family)(vllm_config, device)


class HostSpec:
    """The hooks that a host implements; they are called when an engine starts, never per step."""

    @hookspec
    def eagle_mrv2_host(self) -> Host:  # type: ignore[empty-body]
        """The host that this plugin provides."""
