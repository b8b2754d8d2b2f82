"""What this package knows of one series of vLLM releases, as data; a pluggy plugin provides it.

The maintainer of a fork ships a `Release` of their own through the entry-point group ``vllm_eagle_mrv2.releases``;
where it covers a version that one of ours covers too, theirs comes first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import pluggy
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.method import FAMILIES, METHOD, Family, Settings
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases.surface import Symbol

PROJECT = "vllm_eagle_mrv2"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Supplier = Literal["stock", "eagle_mrv2", "-"]

ALWAYS_OURS = frozenset(
    {
        Behaviour.DRAFT_LOGITS_IN_REPLAY,
        Behaviour.DECODE_METADATA_REBUILD,
        Behaviour.FULL_DECODE_ONLY,
        Behaviour.TARGET_METADATA_REUSE,
        Behaviour.ACTUAL_MAX_SEQ_LEN,
    }
)
"""Behaviours that lie in our own loop and managers on every release, so that they can be switched off on each."""


@dataclass(frozen=True)
class Release:
    """One series of vLLM releases, as data; its speculators are imported only when one is made."""

    name: str
    series: tuple[str, ...]
    """The minor releases that it covers, the oldest first: ``("0.26", "0.27")``."""
    symbols: tuple[Symbol, ...]
    """Every symbol of vLLM's private modules that the adapter relies on."""
    stock: Mapping[Behaviour, str]
    """Behaviours that the releases' own speculator has as well; the value, a version specifier, says on which."""
    speculators: str
    """Module with ``speculator_class(family)``; importing it imports vLLM's private modules."""
    not_offered: Mapping[Behaviour, str] = field(default_factory=dict)
    """Behaviours of settings that vLLM itself does not know or refuses, and on which of the releases."""
    families: tuple[Family, ...] = FAMILIES
    eagle3_over_pp: bool = False
    """Whether EAGLE-3 runs under pipeline parallelism on these releases."""
    v2_by_environment: bool = False
    """Whether these releases know no other way to select Model Runner V2 than VLLM_USE_V2_MODEL_RUNNER."""
    unsupported: tuple[str, ...] = ()
    """What else is refused on these releases, a phrase each, for a person: ``doctor`` lists them."""

    def covers(self, version: Version) -> bool:
        """Whether the adapter is for a release; every patch release of a minor has the same surface."""
        return f"{version.major}.{version.minor}" in self.series

    def symbols_of(self, version: Version) -> tuple[Symbol, ...]:
        """The symbols that the adapter needs on one of its releases."""
        return tuple(symbol for symbol in self.symbols if symbol.needed_on(version))

    def supplier(self, behaviour: Behaviour, version: Version) -> Supplier:
        """Who gives a behaviour on one of the releases: vLLM itself, this package, or nobody.

        Nobody, ``"-"``, is where vLLM does not offer the setting that the behaviour is about.
        """
        for table, name in ((self.stock, "stock"), (self.not_offered, "-")):
            if behaviour in table and version in SpecifierSet(table[behaviour]):
                return cast(Supplier, name)
        return "eagle_mrv2"

    def check_disabled(self, disabled: Iterable[Behaviour], version: Version) -> None:
        """Refuse to switch off what is vLLM's own on a release, or what vLLM does not offer there.

        Raises:
            EagleMRV2Error: with the cause and the remedy.
        """
        for behaviour in sorted(disabled):
            supplier = self.supplier(behaviour, version)
            if supplier != METHOD and behaviour not in ALWAYS_OURS:
                whose = "vLLM's own" if supplier == "stock" else "about a setting unknown"
                raise EagleMRV2Error(
                    f"{behaviour} cannot be disabled: it is {whose} on vLLM {version}; take it out of disable."
                )

    def check_settings(self, settings: Settings, engine_args: Any) -> None:
        """Refuse what cannot run on this adapter.

        Args:
            settings: what was asked for.
            engine_args: vLLM's ``EngineArgs``.

        Raises:
            EagleMRV2Error: with the cause and the remedy.
        """
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower() in ("0", "false"):
            raise EagleMRV2Error(
                f"method={METHOD} runs on Model Runner V2, which VLLM_USE_V2_MODEL_RUNNER=0 forbids; unset it."
            )
        if settings.family not in self.families:
            raise EagleMRV2Error(
                f"method={METHOD} does not support the family {settings.family} on this vLLM release; "
                f"use method={settings.family}."
            )
        stages = getattr(engine_args, "pipeline_parallel_size", 1)
        if settings.family == "eagle3" and stages > 1 and not self.eagle3_over_pp:
            raise EagleMRV2Error(
                f"EAGLE-3 does not run with pipeline_parallel_size={stages} on this vLLM release; "
                "use tensor parallelism, or an EAGLE-1 head."
            )

    def make_speculator(self, vllm_config: Any, device: Any, settings: Settings) -> Any:
        """Our speculator for a marked configuration, a subclass of the release's own."""
        module = importlib.import_module(self.speculators)
        return module.speculator_class(settings.family)(vllm_config, device)


class ReleaseSpec:
    """The hooks that an adapter implements; they are called when an engine starts, never per step."""

    @hookspec
    def eagle_mrv2_release(self) -> Release:  # type: ignore[empty-body]
        """The adapter that this plugin provides."""
