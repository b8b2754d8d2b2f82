"""Writes the generated sections of README.md and docs/ from the code and the recorded results.

    python tools/readme_tables.py            rewrite them
    python tools/readme_tables.py --check    name the stale sections, and exit with 1 if there are any

A section stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fixes import FIXES
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_eagle_mrv2.cli.doctor.recorded import recorded
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.patches import PATCHES
from vllm_eagle_mrv2.releases import all_releases, release_for, supported

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
CELLS = {"stock": "·", "eagle_mrv2": "●", "-": "-", "not applicable": "-", "not possible": "✗"}
_MARKER = "<!-- {}: {} -->"
HEADLINES = ("1b eagle, K=3, batch 1", "1b eagle, K=7, batch 1", "1b eagle, K=7, batch 32", "8b eagle3, K=5, batch 1")
"""Cases that are shown for every release, with their quartiles."""
GAINS = (
    "1b eagle, K=3, batch 1",
    "1b eagle, K=7, batch 1",
    "1b eagle, K=7, batch 32",
    "8b eagle3, K=5, batch 1",
    "8b eagle3, K=5, FP8, batch 1",
    "8b eagle3, K=3, batch 32",
)
"""The cases that the README shows."""
GAINS_ON = "H200"
"""The card of these figures."""
PACKAGES = {"0.1.0": ("0.26", "0.32"), "0.2.0": tuple(f"0.{minor}" for minor in (20, *range(22, 34)))}
"""Minor releases of vLLM that each version of this package supports."""
PLACES = ("H200", "H100", "CPU engine")
AUTO = "auto"
SMOLLM2 = "smollm2"
ADAPTIVE = "adaptive"
"""Said of a load beside stock with ``enable_adaptive_verification``."""
KINDS = ("chat", "code", "editing", "prose")
"""Of SmolLM2's prompts."""


class Strict(BaseModel):
    """A model that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Tests(Strict):
    """The counts of one pytest run."""

    passed: int
    failed: int
    skipped: int
    not_run: int = 0

    def __str__(self) -> str:
        words = ("failed", "skipped", "not_run")
        rest = [f"{number} {word.replace('_', ' ')}" for word in words if (number := getattr(self, word))]
        return ", ".join([str(self.passed), *rest])


class Acceptance(Strict):
    """Mean accepted length with the stock speculator and with ``eagle_mrv2``."""

    stock: float | None
    eagle_mrv2: float | None


class FamilyResult(BaseModel):
    """The result of one draft family; fields that are not used here are ignored."""

    equal: bool
    equal_to: Literal["no speculation", "stock"] = "no speculation"
    acceptance: Acceptance


class Measured(Strict):
    """A case that was measured on random weights."""

    shape: str
    method: str
    k: int
    setting: str = ""
    commit: str = ""

    @property
    def case(self) -> str:
        """The measured case without its batch size or concurrency, as part of the label of a table row."""
        return ", ".join([f"{self.shape} {self.method}", f"K={self.k}", *([self.setting] if self.setting else [])])


class Iteration(Measured):
    """Milliseconds per engine iteration, and their ratio with quartiles over the rounds of benchmarks/ab_time.py."""

    batch: int
    stock: list[float]
    eagle_mrv2: list[float]
    ratio: float
    quartiles: tuple[float, float] | None = None
    rounds: int | None = None
    without: tuple[str, ...] = ()
    before: str = ""

    def __str__(self) -> str:
        spread = f" ({self.quartiles[0]:.2f} to {self.quartiles[1]:.2f})" if self.quartiles else ""
        return f"{self.ratio:.2f}{spread}"


class Load(Measured):
    """The gain in tokens per second under load, of benchmarks/load_times.py: over all rounds, lowest and highest."""

    concurrency: int
    gain: tuple[float, float, float]
    control: tuple[float, float, float] | None = None
    figures: dict[str, dict[str, float]]
    tokens_per_second: dict[str, list[float]] = {}
    rounds: int = 0

    @property
    def words(self) -> list[str]:
        """What is special about it."""
        return self.setting.split(", ") if self.setting else []

    def __str__(self) -> str:
        control = f"; {self.control[0]:.2f}" if self.control else ""
        return f"{self.gain[0]:.2f} ({self.gain[1]:.2f} to {self.gain[2]:.2f}){control}"


class Lengths(Measured):
    """Tokens a second with each number of draft tokens and with the engine's own choice, of draft_lengths.py."""

    accepted: Literal["high", "middle", "low"]
    concurrency: int
    tokens_per_second: dict[str, float]
    rounds: dict[str, list[tuple[float, float]]] = {}
    chosen: dict[str, float] = {}
    """Seconds of the rounds of `AUTO` by number of draft tokens."""


class Changes(Measured):
    """The same while the load or the acceptance changes: a figure for each phase; and the course of the own choice."""

    change: str
    tokens_per_second: dict[str, list[float]]
    course: dict[str, list[list[float]]]


class DraftMetadata(Strict):
    """Builds of the draft's attention metadata per build of the target's, and their maximum sequence length.

    ``max_seq_len`` is None if neither side builds any.
    """

    draft_prefill_builds: float
    draft_decode_builds: float
    max_seq_len: float | None = None


class Result(Strict):
    """One file of benchmarks/results, whose README describes the fields."""

    vllm: str
    where: str
    date: str
    command: str | list[str]
    versions: dict[str, str]
    tests: Tests | None
    families: dict[str, FamilyResult]
    iteration_ms: list[Iteration]
    under_load: list[Load] = []
    draft_lengths: list[Lengths | Changes] = []
    notes: list[str]
    commit: str | None = None
    draft_metadata: dict[Literal["stock", "eagle_mrv2"], DraftMetadata] = {}
    earlier: list[dict[str, Any]] = []


class Accepted(BaseModel):
    """Greedy drafts of one kind of prompt that were accepted."""

    model_config = ConfigDict(extra="forbid")

    vllm: str
    setting: Literal["head alone", "lookup_drafts"]
    k: int
    kind: str
    accepted_length: float
    by_position: list[float]
    drafts: int


class Stale(Exception):
    """A page or a result is invalid; one line for the user."""


def read_results(folder: Path = RESULTS) -> dict[str, list[Result]]:
    """Release -> its results, in the order of their file names."""
    results: dict[str, list[Result]] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            result = Result.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as error:
            problem = error.errors()[0]
            raise Stale(f"{file.name}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
        results.setdefault(result.vllm, []).append(result)
    return results


# The sections


def releases() -> list[str]:
    """One release for each supported minor: the recorded one, or else its first."""
    by_minor = {_minor(release): release for release in recorded()}
    minors = sorted((series for adapter in all_releases() for series in adapter.series), key=Version)
    return [by_minor.get(minor, f"{minor}.0") for minor in minors]


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def supported_section() -> str:
    """One sentence with the supported releases."""
    return f"For stock vLLM {supported()}."


def compatibility_section() -> str:
    """The package versions that support each release, and where its tests passed."""
    columns = releases()
    results = read_results()
    rows = [
        [f"vllm-eagle-mrv2 {package}", *("●" if _minor(release) in minors else "-" for release in columns)]
        for package, minors in PACKAGES.items()
    ]
    for place in PLACES:
        rows.append([f"tests passed on: {place}", *(_verdict(results.get(release, []), place) for release in columns)])
    heads = [_minor(release).partition(".")[2] for release in columns]
    legend = (
        "● yes, - no or not run. One patch release of each vLLM minor was tested, on the day that the "
        "benchmarks page names; CPU engines have no CUDA graphs."
    )
    return _table(["vLLM 0.", *heads], rows, ":-:") + f"\n\n{legend}"


def _verdict(runs: list[Result], place: str) -> str:
    tests = [run.tests for run in runs if run.where == place and run.tests is not None]
    failed, not_run = (sum(getattr(one, which) for one in tests) for which in ("failed", "not_run"))
    passed = f"● ({not_run} not run)" if not_run else "●"
    return f"{failed} failed" if failed else passed if tests else "-"


def gains_section() -> str:
    """Speedups in the cases of the README, on the releases with more than two of them measured."""
    rows: dict[str, dict[str, Iteration]] = {case: {} for case in GAINS}
    for release, runs in _by_release():
        of_card = [run for run in runs if run.where == GAINS_ON]
        cases = {f"{one.case}, batch {one.batch}": one for one in _timed(of_card) if not one.without}
        if len(cases.keys() & rows.keys()) > 2:
            for case in cases.keys() & rows.keys():
                rows[case][release] = cases[case]
    legend = (
        "Time of an engine iteration with the stock speculator of the same release / with `eagle_mrv2`, median and "
        "quartiles; above 1, `eagle_mrv2` is faster; - not measured yet."
    )
    return _crossed(f"{GAINS_ON}, steady decode", rows, Version) + f"\n\n{legend}"


def behaviours_section() -> str:
    """Who supplies each behaviour on each release."""
    columns = releases()
    rows = []
    for behaviour in Behaviour:
        suppliers = (release_for(release).supplier(behaviour, Version(release)) for release in columns)
        rows.append([f"`{behaviour}`: {behaviour.summary}", *(CELLS[supplier] for supplier in suppliers)])
    heads = [_minor(release).partition(".")[2] for release in columns]
    legend = (
        f"{CELLS['eagle_mrv2']} `eagle_mrv2` adds it, {CELLS['stock']} stock has it too, "
        f"{CELLS['-']} does not apply there."
    )
    return _table(["vLLM 0.", *heads], rows, ":-:") + f"\n\n{legend}"


def fixes_section() -> str:
    """Who fixes each defect on each release."""
    columns = releases()
    rows = [
        [
            f"{fix.symptom}{f' ({fix.upstream})' if fix.upstream else ''}",
            *(CELLS[fix.state(Version(release))] for release in columns),
            fix.why,
        ]
        for fix in FIXES
    ]
    heads = [_minor(release).partition(".")[2] for release in columns]
    legend = (
        f"{CELLS['eagle_mrv2']} `eagle_mrv2` mends it, {CELLS['stock']} stock is without it, "
        f"{CELLS['-']} the release lacks what it is about, {CELLS['not possible']} it stays, for the reason given."
    )
    return _table(["vLLM 0.", *heads, "why it stays"], rows, ":-:") + f"\n\n{legend}"


def patches_section() -> str:
    """Every patch: its target, releases, purpose and the upstream change that would end it."""
    rows = [[f"`{patch.target}`", patch.releases or "all", patch.what, patch.why, patch.until] for patch in PATCHES]
    return _table(["target", "vLLM", "what the patch does", "why", "until"], rows, "---")


def results_section() -> str:
    """The test runs of each release and their results."""
    results = read_results()
    rows = []
    for release in sorted({*releases(), *results}, key=Version):
        runs = results.get(release, [])
        cells: tuple[Callable[[Result], str], ...] = (
            lambda run: run.where,
            lambda run: run.date,
            lambda run: str(run.tests or "-"),
            _equality,
            _acceptance,
        )
        rows.append(
            [release, *("<br>".join(cell(run) for run in runs) for cell in cells)]
            if runs
            else [release, "not run", *[""] * 4]
        )
    heads = ["vLLM", "ran on", "date", "tests passed", "tokens equal", "accepted length, eagle_mrv2 / stock"]
    legend = (
        "Tokens equal: greedy; on the CPU (float32) to the run without speculation, on a GPU (bfloat16) to stock's. "
        "Acceptance: mean accepted length at K=3."
    )
    return _table(heads, rows, "---") + f"\n\n{legend}"


def _equality(run: Result) -> str:
    unequal = [family for family, result in run.families.items() if not result.equal]
    equal = [family for family, result in run.families.items() if result.equal]
    return ", ".join([*equal, *(f"**not {family}**" for family in unequal)]) or "-"


def _acceptance(run: Result) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    pairs = ((family, result.acceptance) for family, result in run.families.items())
    return ", ".join(f"{family} {number(one.eagle_mrv2)} / {number(one.stock)}" for family, one in pairs) or "-"


def speed_section() -> str:
    """Timings of the headline cases, and of the cases with a special setting."""
    rows: dict[str, dict[str, Iteration]] = {}
    for release, runs in read_results().items():
        for one in _timed(runs):
            if not one.without:
                rows.setdefault(f"{one.case}, batch {one.batch}", {})[release] = one
    shown = {case: row for case, row in rows.items() if case in HEADLINES or any(one.setting for one in row.values())}
    legend = (
        "Time of an engine iteration with stock / with `eagle_mrv2`, and quartiles over the rounds; above 1, "
        "`eagle_mrv2` is faster."
    )
    return _crossed("case", shown, Version) + f"\n\n{legend}"


def batches_section() -> str:
    """Ratios by batch size, on the releases measured at three batch sizes or more."""
    timed: dict[str, dict[tuple[str, int], Iteration]] = {}
    for release, runs in _by_release():
        cases = {(one.case, one.batch): one for one in _timed(runs) if not (one.without or one.setting)}
        if len({batch for _, batch in cases}) > 2:
            timed[release] = cases
    rows: dict[str, dict[str, str]] = {}
    # The release with the most cases decides the order of the rows.
    for of_release in sorted(timed.values(), key=len, reverse=True):
        for case, batch in of_release:
            ratios = [f"{cases[case, batch].ratio:.2f}" if (case, batch) in cases else "-" for cases in timed.values()]
            rows.setdefault(case, {})[f"batch {batch}"] = ", ".join(ratios)
    return _crossed(f"stock / eagle_mrv2 on {', '.join(timed)}", rows, _number)


def alone_section() -> str:
    """The gain of each behaviour: time of ``eagle_mrv2`` without it / time of ``eagle_mrv2``."""
    rows: dict[str, dict[str, Iteration]] = {}
    for release, runs in read_results().items():
        for one in _timed(runs):
            if one.without:
                names = ", ".join(f"`{name}`" for name in one.without)
                rows.setdefault(f"{names}: {one.case}, {release}", {})[f"batch {one.batch}"] = one
    return _crossed("without / with the behaviour", rows, _number)


def _loads(*, adaptive: bool = False) -> Iterator[tuple[str, str, Load]]:
    """(release, card, load), oldest release first, beside vLLM's adaptive verification or not."""
    for release, runs in _by_release():
        for run in runs:
            for one in run.under_load:
                if (ADAPTIVE in one.words) is adaptive:
                    yield release, run.where, one


def load_section() -> str:
    """Gains under load by the number of requests in flight, with random weights; those of all pairs of engines."""
    rows: dict[str, dict[str, str]] = {}
    for release, where, one in _loads():
        if one.shape != SMOLLM2:
            row, column = rows.setdefault(f"{one.case}, {release}, {where}", {}), f"{one.concurrency} in flight"
            row[column] = f"{row[column]}<br>{one}" if column in row else str(one)
    return _crossed("tokens per second, eagle_mrv2 / stock", rows, lambda column: int(column.split()[0]))


def lengths_section() -> str:
    """What the engine's own choice of the number of draft tokens makes, beside each number that is held."""
    found = [
        (f"{release}, {run.where}", one)
        for release, runs in _by_release()
        for run in runs
        for one in run.draft_lengths
        if isinstance(one, Lengths)
    ]
    known = any(one.chosen for _, one in found)
    held = list(dict.fromkeys(name for _, one in found for name in one.tokens_per_second if name != AUTO))
    rows = []
    for place, one in found:
        speeds = dict(one.tokens_per_second)
        auto = speeds.pop(AUTO)
        best = max(speeds, key=lambda name: speeds[name])
        chosen = [_chosen(one, speeds)] if known else []
        shares = [_share_of(one, best, auto / speeds[best]), *chosen, f"{auto / speeds['0']:.2f}"]
        cells = [*(f"{speeds[name]:.0f}" if name in speeds else "-" for name in held), f"{auto:.0f}"]
        rows.append([place, one.case, one.accepted, str(one.concurrency), *cells, *shares])
    ratios = [f"{AUTO} / best", *(["chosen / best"] if known else []), f"{AUTO} / K=0"]
    heads = ["vLLM", "case", "accepted", "in flight", *(f"K={name}" for name in held), AUTO, *ratios]
    return _with_plots(_table(heads, rows, "---"), "lengths", Lengths) if rows else "Not measured yet."


def _share_of(one: Lengths, best: str, share: float) -> str:
    """The share of the best number, and its standard error, if rounds tell: each has the same requests for all."""
    rounds = [one.rounds.get(name, []) for name in (AUTO, best)]
    ratios = [own / others for (own, _), (others, _) in zip(*rounds, strict=False)]
    if len(ratios) < 2:
        return f"{share:.2f}"
    return f"{share:.2f} ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.2f}"


def _chosen(one: Lengths, speeds: Mapping[str, float]) -> str:
    """What the chosen numbers make where they are held, each for as long as it was chosen, as a share of the best."""
    if not one.chosen:
        return "-"
    made = sum(seconds * speeds[name] for name, seconds in one.chosen.items())
    return f"{made / sum(one.chosen.values()) / max(speeds.values()):.3f}"


def changes_section() -> str:
    """The same while the load or the acceptance changes: the share of the best number in each phase."""
    rows = []
    for release, runs in _by_release():
        for run in runs:
            for one in (each for each in run.draft_lengths if isinstance(each, Changes)):
                speeds = dict(one.tokens_per_second)
                auto = speeds.pop(AUTO)
                best = [max((speed, f"K={name}") for name, speed in at) for at in _by_phase(speeds)]
                shares = [f"{own / most:.2f} of {name}" for own, (most, name) in zip(auto, best, strict=True)]
                rows.append([f"{release}, {run.where}", one.case, one.change, ", ".join(shares)])
    heads = ["vLLM", "case", "what changes", f"{AUTO}, of the best number of each phase"]
    return _with_plots(_table(heads, rows, "---"), "changes", Changes) if rows else "Not measured yet."


def _with_plots(table: str, what: str, kind: type[Lengths] | type[Changes]) -> str:
    """The table, and links to what tools/draft_length_plots.py draws of each result that has such measurements."""
    runs = [run for _, runs in _by_release() for run in runs if any(isinstance(one, kind) for one in run.draft_lengths)]
    return "\n\n".join([table, *(f"![{what}, {run.vllm}, {run.where}]({plot_of(run, what)})" for run in runs)])


def plot_of(run: Result, what: str) -> str:
    """The name of a plot of a result."""
    return f"draft-length-{what}-{run.vllm}-{run.where.lower()}.svg"


def _by_phase(speeds: Mapping[str, list[float]]) -> list[list[tuple[str, float]]]:
    """(number of draft tokens, tokens a second) of all numbers, for each phase."""
    return [list(zip(speeds, at, strict=True)) for at in zip(*speeds.values(), strict=True)]


def smollm2_section() -> str:
    """Accepted length of SmolLM2's head by kind of prompt, of benchmarks/smollm2_acceptance.py."""
    lines = (RESULTS / "cpu-smollm2.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [Accepted.model_validate_json(line) for line in lines]
    kinds = list(dict.fromkeys(one.kind for one in runs))
    alone, lookup = (
        {one.kind: one for one in runs if one.setting == setting} for setting in ("head alone", "lookup_drafts")
    )
    rows = []
    for kind in kinds:
        before, after = alone[kind].accepted_length, lookup[kind].accepted_length
        positions = ", ".join(f"{share:.2f}" for share in alone[kind].by_position)
        rows.append([kind, f"{before:.2f}", positions, f"{after:.2f}", f"{after / before:.2f}"])
    return _table(["prompts", "the head alone", "positions 1 to 5", "with `lookup_drafts`", "ratio"], rows, "---")


def smollm2_speed_section() -> str:
    """Tokens a second with SmolLM2, of benchmarks/load_times.py: a column for each engine."""
    rows: dict[tuple[str, str, str, int], dict[str, str]] = {}
    for release, where, one in _loads():
        if one.shape != SMOLLM2 or "no speculation" not in one.figures:
            continue
        kind = next((word for word in one.words if word in KINDS), "all")
        variant = ", ".join(word for word in one.words if word not in KINDS) or "eagle_mrv2"
        row = rows.setdefault((release, where, kind, one.concurrency), {})
        for engine in ("no speculation", "stock"):
            row[engine] = f"{one.figures[engine]['tokens_per_second']:.0f}"
        row[variant] = f"{one.figures['eagle_mrv2']['tokens_per_second']:.0f}, {one}"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[*map(str, case), *(row.get(column, "-") for column in columns)] for case, row in rows.items()]
    return _table(["vLLM", "on", "prompts", "in flight", *columns], cells, "---")


def adaptive_section() -> str:
    """What the engine's own choice makes beside stock's adaptive verification: tokens a second, accepted lengths."""
    rows = []
    for release, where, one in _loads(adaptive=True):
        sides = [one.figures[side] for side in ("stock", "eagle_mrv2")]
        speeds = [f"{side['tokens_per_second']:.0f} ({side['accepted_length']:.2f})" for side in sides]
        case = f"{one.shape} {one.method}, K={one.k}"
        rows.append([f"{release}, {where}", case, str(one.concurrency), *speeds, str(one)])
    heads = ["vLLM", "case", "in flight", "adaptive verification", AUTO, f"{AUTO} / adaptive verification"]
    return _table(heads, rows, "---")


def _by_release() -> list[tuple[str, list[Result]]]:
    """(release, its results), oldest release first."""
    return sorted(read_results().items(), key=lambda item: Version(item[0]))


def _timed(runs: list[Result]) -> list[Iteration]:
    """The comparisons with stock, and with ``eagle_mrv2`` without a behaviour."""
    return [one for run in runs for one in run.iteration_ms if not one.before]


def _number(head: str) -> int:
    return int(head.split()[-1])


def _crossed(corner: str, rows: Mapping[str, Mapping[str, object]], order: Callable[[str], Any]) -> str:
    columns = sorted({column for row in rows.values() for column in row}, key=order)
    cells = [[case, *(str(row.get(column, "-")) for column in columns)] for case, row in rows.items()]
    return _table([corner, *columns], cells, "---")


def metadata_section() -> str:
    """What `target_metadata_reuse`, `fused_draft_decode` and `actual_max_seq_len` change."""
    rows = [
        [release, *(_sides(run.draft_metadata, field) for field in DraftMetadata.model_fields)]
        for release, runs in _by_release()
        for run in runs
        if run.draft_metadata
    ]
    rows = [row for place, row in enumerate(rows) if row not in rows[:place]]  # on every card the same
    heads = ["vLLM", "builds for draft prefill", "builds for draft decodes", "longest sequence"]
    return _table([heads[0], *(f"{head}, stock → eagle_mrv2" for head in heads[1:])], rows, "---")


def _sides(metadata: Mapping[Any, DraftMetadata], field: str) -> str:
    values = [getattr(metadata[side], field) for side in ("stock", "eagle_mrv2")]
    return "-" if None in values else " → ".join(f"{value:g}" for value in values)


def _table(heads: list[str], rows: list[list[str]], rule: str) -> str:
    lines = [heads, ["---", *[rule] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


Sections = Mapping[str, Callable[[], str]]
SECTIONS: Sections = {"supported": supported_section, "gains": gains_section, "compatibility": compatibility_section}
"""The sections of the README."""
PAGES: Mapping[Path, Sections] = {
    README: SECTIONS,
    DOCS / "behaviours.md": {"behaviours": behaviours_section},
    DOCS / "benchmarks.md": {
        "results": results_section,
        "speed": speed_section,
        "batches": batches_section,
        "load": load_section,
        "smollm2": smollm2_section,
        "smollm2-speed": smollm2_speed_section,
        "alone": alone_section,
        "metadata": metadata_section,
    },
    DOCS / "draft-length.md": {"lengths": lengths_section, "changes": changes_section, "adaptive": adaptive_section},
    DOCS / "fixes.md": {"fixes": fixes_section},
    DOCS / "patches.md": {"patches": patches_section},
}


# The pages


def rewrite(text: str, sections: Sections = SECTIONS) -> tuple[str, list[str]]:
    """The text with its sections regenerated, and the names of the sections that were stale.

    Raises:
        Stale: a section has no markers in the text, or markers name no section.
    """
    marked = re.findall(r"<!-- generated: (\S+) -->", text)
    if sorted(marked) != sorted(sections):
        raise Stale(f"there are places for {sorted(marked)}, and the sections are {sorted(sections)}")
    stale = []
    for name, make in sections.items():
        before, start, rest = text.partition(_MARKER.format("generated", name) + "\n")
        old, end, after = rest.partition(_MARKER.format("end", name))
        if not (start and end):
            raise Stale(f"there is no end of the section {name}")
        new = make() + "\n"
        if new != old:
            stale.append(name)
        text = before + start + new + end + after
    return text, stale


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 where something is stale")
    parser.add_argument("--readme", type=Path, help="this file in place of README.md, and no other")
    options = parser.parse_args(arguments)
    pages = PAGES if options.readme is None else {options.readme: SECTIONS}
    stale: list[str] = []
    for page, sections in pages.items():
        try:
            new, of_page = rewrite(page.read_text(encoding="utf-8"), sections)
        except Stale as error:
            print(f"error: {page.name}: {error}", file=sys.stderr)
            return 1
        stale += of_page
        if of_page and not options.check:
            page.write_text(new, encoding="utf-8")
    if options.check:
        print(f"stale: {', '.join(stale)}: run python tools/readme_tables.py" if stale else "up to date")
        return int(bool(stale))
    print(f"rewrote {', '.join(stale)}" if stale else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
