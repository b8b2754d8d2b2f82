"""One series of vLLM releases as data, which a pluggy plugin provides.

The maintainer of a vLLM fork can ship a `Release` through the entry-point group ``vllm_eagle_mrv2.releases``.  It takes
precedence over this package's own for every version that both cover.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import pluggy
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.families import FAMILIES, METHOD, Family
from vllm_eagle_mrv2.config.method import Settings
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
"""Behaviours of this package's own loop and graph managers; they can be switched off on every release."""


@dataclass(frozen=True)
class Release:
    """One series of vLLM releases as data; its adapter is imported only when a speculator is made."""

    name: str
    series: tuple[str, ...]
    """The minor releases that it covers, oldest first: ``("0.26", "0.27")``."""
    symbols: tuple[Symbol, ...]
    """Every symbol of vLLM's private modules that the adapter relies on."""
    stock: Mapping[Behaviour, str]
    """Behaviours that the stock speculator has as well -> version specifier of the releases where it has them."""
    adapter: str
    """Module with the release's ``Adapter``, a `ReleaseAdapter`; importing it imports vLLM's private modules."""
    not_offered: Mapping[Behaviour, str] = field(default_factory=dict)
    """Behaviours of settings that vLLM lacks or refuses -> version specifier of the releases where it does."""
    families: tuple[Family, ...] = FAMILIES
    v2_by_environment: bool = False
    """Whether VLLM_USE_V2_MODEL_RUNNER is the only way to select Model Runner V2 on these releases."""
    logits_of_any_dtype: bool = True
    """Whether ``draft_logits_dtype`` may be another than float32: the rejection sampler applies temperature itself."""

    def covers(self, version: Version) -> bool:
        """Whether a version belongs to the series; all patch releases of a minor have the same surface."""
        return f"{version.major}.{version.minor}" in self.series

    def symbols_of(self, version: Version) -> tuple[Symbol, ...]:
        """The symbols that the adapter needs on one of its releases."""
        return tuple(symbol for symbol in self.symbols if symbol.needed_on(version))

    def supplier(self, behaviour: Behaviour, version: Version) -> Supplier:
        """Who supplies a behaviour on one of the releases: ``"stock"``, ``"eagle_mrv2"`` or nobody.

        Nobody, ``"-"``, means that vLLM does not offer the setting that the behaviour is about.
        """
        for table, name in ((self.stock, "stock"), (self.not_offered, "-")):
            if behaviour in table and version in SpecifierSet(table[behaviour]):
                return cast(Supplier, name)
        return "eagle_mrv2"

    def check_disabled(self, disabled: Iterable[Behaviour], version: Version) -> None:
        """Refuse to switch off behaviours that stock vLLM has on a release, or whose setting vLLM lacks there.

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

    def check_settings(self, settings: Settings) -> None:
        """Refuse settings that cannot run on these releases.

        Args:
            settings: what the user asked for.

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
        if settings.options.draft_logits_dtype != "float32" and not self.logits_of_any_dtype:
            raise EagleMRV2Error(
                f"draft_logits_dtype={settings.options.draft_logits_dtype} is not exact below vLLM 0.28, whose "
                "rejection sampler reads logits after temperature; leave it at float32."
            )

    def speculator_class(self, family: Family) -> type:
        """Return this package's speculator class for a family, a subclass of vLLM's."""
        from vllm_eagle_mrv2.drafting.drafter import make_speculator_class

        return make_speculator_class(importlib.import_module(self.adapter).Adapter, family)


class ReleaseSpec:
    """The hooks of a release plugin, which are called when an engine starts, never per step."""

    @hookspec
    def eagle_mrv2_release(self) -> Release:  # type: ignore[empty-body]
        """The `Release` that this plugin provides."""
