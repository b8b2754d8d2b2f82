"""What has vLLM draft and verify the chosen number of tokens: the scheduler's side, the workers', and CUDA graphs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from vllm_eagle_mrv2.config.draft_lengths import asks_for_choice, lengths_to_choose_from, why_not_chosen
from vllm_eagle_mrv2.config.method import Settings, mark
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.draft_length.chooser import DraftLength
from vllm_eagle_mrv2.draft_length.notes import GraphTime, Plan, note_graph_times, planned_drafts
from vllm_eagle_mrv2.patches import draft_length
from vllm_eagle_mrv2.telemetry.counters import FOLDER_VARIABLE, DraftCounter, read_counts


def config_of(
    most: int = 5,
    *,
    chosen: bool = True,
    ranks: int = 1,
    stages: int = 1,
    experts: bool = False,
    hybrid: bool = False,
    connector: object = None,
    launcher: str = "mp",
    context_ranks: int = 1,
    sizes: Sequence[int] | None = (1, 512),
    **changes: Any,
) -> Any:
    """The configuration of an engine that asks for ``draft_length``, auto or constant."""
    draft = SimpleNamespace(
        num_speculative_tokens=most,
        num_speculative_tokens_per_batch_size=None,
        uses_dynamic_speculative_decoding=lambda: False,
    )
    vars(draft).update(changes)
    mark(draft, Settings("eagle", Options(draft_length="auto" if chosen else "constant")))
    parallel = SimpleNamespace(
        data_parallel_size=ranks,
        data_parallel_index=3,
        tensor_parallel_size=2,
        pipeline_parallel_size=stages,
        distributed_executor_backend=launcher,
        prefill_context_parallel_size=context_ranks,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(is_moe=experts, is_hybrid=hybrid),
        kv_transfer_config=connector,
        speculative_config=draft,
        parallel_config=parallel,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
    )


def stock_config() -> Any:
    """Of an engine that does not ask for this package."""
    config = config_of()
    config.speculative_config = SimpleNamespace(num_speculative_tokens=5)
    return config


# What there is to choose from


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        (1, (0, 1)),
        (2, (0, 1, 2)),
        (5, (0, 1, 2, 3, 5)),
        (7, (0, 1, 2, 3, 5, 7)),
        (9, (0, 1, 2, 3, 5, 7, 9)),
    ],
)
def test_the_maximum_is_one_of_a_few_numbers(most: int, lengths: tuple[int, ...]) -> None:
    assert lengths_to_choose_from(config_of(most)) == lengths


NOT_CHOSEN: list[tuple[dict[str, Any], str]] = [
    ({"num_speculative_tokens_per_batch_size": [(1, 4, 5), (5, 8, 2)]}, "num_speculative_tokens_per_batch_size"),
    ({"enable_adaptive_verification": True}, "enable_adaptive_verification"),
    ({"ranks": 2, "experts": True}, "data-parallel"),
    ({"stages": 2}, "pipeline stages"),
    ({"hybrid": True}, "recurrent layers"),
    ({"connector": "P/D"}, "KV connector"),
    ({"launcher": "external_launcher"}, "external_launcher"),
    ({"context_ranks": 2}, "prefill_context_parallel_size"),
]


@pytest.mark.parametrize(("changes", "named"), NOT_CHOSEN, ids=[named for _, named in NOT_CHOSEN])
def test_something_else_decides(changes: dict[str, Any], named: str) -> None:
    config = config_of(**changes)
    assert named in (why_not_chosen(config) or "")
    assert asks_for_choice(config)
    assert lengths_to_choose_from(config) == ()


@pytest.mark.parametrize("changes", [{}, {"enable_adaptive_verification": False}, {"ranks": 2}, {"experts": True}])
def test_nothing_keeps_the_number_from_being_chosen(changes: dict[str, Any]) -> None:
    assert why_not_chosen(config_of(**changes)) is None


def test_nobody_asks() -> None:
    undrafted = SimpleNamespace(speculative_config=None)
    for config in (config_of(chosen=False), stock_config(), undrafted):
        assert not asks_for_choice(config)
        assert lengths_to_choose_from(config) == ()


# The scheduler


class Chooser:
    """A `DraftLength` that writes down what it is asked and told."""

    def __init__(
        self, lengths: tuple[int, ...], captured: int, counter: DraftCounter, graph_times: list[GraphTime]
    ) -> None:
        self.lengths, self.graph_times = lengths, graph_times
        self.length = 3
        self.coming = 2  # what it chooses next
        self.asked: list[int] = []
        self.learned: list[tuple[Any, ...]] = []

    def choose(self, requests: int) -> int:
        self.asked.append(requests)
        self.length = self.coming
        return self.length

    def learn(self, decodes: int, length: int, prefilled: int, outcomes: Any) -> None:
        self.learned.append((decodes, length, prefilled, dict(outcomes)))


def scheduler_of(config: Any, **requests: tuple[int, int]) -> Any:
    """A scheduler with requests of so many tokens, the first of which are computed."""
    return SimpleNamespace(
        vllm_config=config,
        num_spec_tokens=5,
        _spec_token_placeholders=[-1] * 5,
        requests={
            name: SimpleNamespace(num_computed_tokens=computed, num_tokens=tokens)
            for name, (computed, tokens) in requests.items()
        },
    )


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Chooser]]:
    """Makes a scheduler and its chooser."""
    monkeypatch.setattr(draft_length, "DraftLength", Chooser)

    def make(**requests: tuple[int, int]) -> tuple[Any, Chooser]:
        scheduler = scheduler_of(config_of(), **requests)
        chooser: Any = draft_length.chooser_of(scheduler)
        return scheduler, chooser

    return make


def test_a_chooser_is_told_what_graphs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_length, "DraftLength", Chooser)
    config, times = config_of(), [GraphTime(1, 0, 0.01)]
    note_graph_times(config, times)
    assert draft_length.chooser_of(scheduler_of(config)).graph_times == times  # type: ignore[union-attr]
    assert draft_length.chooser_of(scheduler_of(config_of())).graph_times == []  # type: ignore[union-attr]


def test_a_scheduler_keeps_its_chooser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    scheduler = scheduler_of(config_of(7))
    chooser = draft_length.chooser_of(scheduler)
    assert isinstance(chooser, DraftLength)
    assert chooser.lengths == (0, 1, 2, 3, 5, 7)
    assert [rank for rank, _ in read_counts()] == [3], "it counts for its data-parallel rank"
    assert chooser._captured == 512
    assert draft_length.chooser_of(scheduler) is chooser
    assert draft_length.chooser_of(scheduler_of(config_of(7))) is not chooser


def test_without_graphs_every_prefill_is_larger_than_them() -> None:
    chooser = draft_length.chooser_of(scheduler_of(config_of(7, sizes=None)))
    assert chooser is not None
    assert chooser._captured == 0


@pytest.mark.parametrize(
    "config",
    [stock_config(), config_of(chosen=False), config_of(ranks=2, experts=True)],
    ids=["stock", "constant", "ranks"],
)
def test_a_number_that_is_not_chosen(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is looked at once, and vLLM's scheduler works as ever."""
    looked_at: list[Any] = []

    def lengths(config: Any) -> tuple[int, ...]:
        looked_at.append(config)
        return lengths_to_choose_from(config)

    monkeypatch.setattr(draft_length, "lengths_to_choose_from", lengths)
    scheduler, before = scheduler_of(config, a=(9, 10)), dict(vars(scheduler_of(config)))
    seen: list[Any] = []
    output = SimpleNamespace(num_scheduled_tokens={"a": 1}, scheduled_spec_decode_tokens={})
    untouched = dict(vars(output))
    schedule = draft_length.padded_as_verified(lambda self, *args, **kwargs: (self.num_spec_tokens, args, kwargs))
    assert schedule(scheduler, 1, two=2) == (5, (1,), {"two": 2})
    draft_length.number_chosen(lambda self, output: seen.append(dict(vars(output))))(scheduler, output)
    learned = draft_length.outcome_learned(lambda self, output, outcome: (output, outcome))
    assert learned(scheduler, output, "of the model") == (output, "of the model")
    assert seen == [untouched]
    assert vars(output) == untouched
    assert looked_at == [config]
    assert draft_length.chooser_of(scheduler) is None
    assert (scheduler.num_spec_tokens, scheduler._spec_token_placeholders) == (5, before["_spec_token_placeholders"])


def test_new_decodes_are_padded_as_the_others_verify(choosing: Any) -> None:
    scheduler, chooser = choosing()
    schedule = draft_length.padded_as_verified(lambda self, *args, **kwargs: (self.num_spec_tokens, args, kwargs))
    assert schedule(scheduler, 1, two=2) == (3, (1,), {"two": 2})
    chooser.length = 0
    assert schedule(scheduler) == (0, (), {})
    assert scheduler.num_spec_tokens == 5


def test_a_schedule_that_fails_leaves_the_maximum(choosing: Any) -> None:
    scheduler, _ = choosing()

    def fail(self: Any) -> None:
        raise RuntimeError(f"with {self.num_spec_tokens}")

    with pytest.raises(RuntimeError, match="with 3"):
        draft_length.padded_as_verified(fail)(scheduler)
    assert scheduler.num_spec_tokens == 5


def plan_of(scheduler: Any, **scheduled: int) -> Plan:
    """What is noted of an iteration before vLLM goes on."""
    output = SimpleNamespace(num_scheduled_tokens=scheduled, num_spec_tokens_to_schedule=5)
    seen: list[Plan] = []

    def update_after_schedule(self: Any, output: Any) -> None:
        plan: Plan = output.eagle_mrv2_plan
        seen.append(plan)
        assert output.num_spec_tokens_to_schedule == plan.drafts
        assert self._spec_token_placeholders == [-1] * plan.drafts

    draft_length.number_chosen(update_after_schedule)(scheduler, output)
    assert len(seen) == 1
    assert planned_drafts(output) == seen[0].drafts
    return seen[0]


@pytest.mark.parametrize("coming", [0, 1, 5])
def test_the_number_is_chosen_before_vllm_goes_on(coming: int, choosing: Any) -> None:
    scheduler, chooser = choosing(a=(20, 21), b=(30, 31))
    chooser.coming = coming
    assert plan_of(scheduler, a=4, b=4) == Plan(coming, verified=3, decodes=2, prefilled=0)
    assert chooser.asked == [2]
    # The next iteration verifies them.
    assert plan_of(scheduler, a=1 + coming, b=1 + coming).verified == coming


@pytest.mark.parametrize(
    ("computed", "tokens", "scheduled", "coming"),
    [(0, 100, 100, 2), (60, 100, 40, 2), (0, 100, 99, 1), (0, 100, 40, 1)],
    ids=["whole", "the last chunk", "all but one token", "the first chunk"],
)
def test_a_prompt_that_ends_is_a_coming_decode(
    computed: int, tokens: int, scheduled: int, coming: int, choosing: Any
) -> None:
    scheduler, chooser = choosing(a=(20, 21), b=(computed, tokens))
    assert plan_of(scheduler, a=4, b=scheduled) == Plan(2, verified=3, decodes=1, prefilled=scheduled)
    assert chooser.asked == [coming]


@pytest.mark.parametrize(("tokens", "decodes"), [(1, 1), (4, 1), (5, 0)])
def test_whatever_has_more_tokens_than_drafts_and_one_is_a_prefill(tokens: int, decodes: int, choosing: Any) -> None:
    """A decode has fewer where some of its drafts are cut off."""
    scheduler, _ = choosing(a=(20, 21))
    plan = plan_of(scheduler, a=tokens)
    assert (plan.decodes, plan.prefilled) == (decodes, 0 if decodes else tokens)


@pytest.mark.parametrize("scheduled", [{}, {"b": 40}], ids=["nothing", "a chunk"])
def test_an_iteration_without_decodes_keeps_the_number(scheduled: dict[str, int], choosing: Any) -> None:
    scheduler, chooser = choosing(b=(0, 100))
    assert plan_of(scheduler, **scheduled) == Plan(3, verified=3, decodes=0, prefilled=sum(scheduled.values()))
    assert chooser.asked == []


def learned_from(
    scheduler: Any, plan: Plan | None, drafts: dict[str, list[int]], sampled: dict[str, list[int]] | None
) -> None:
    """Have an iteration's tokens arrive."""
    new = [SimpleNamespace(req_id="new")]
    output: Any = SimpleNamespace(scheduled_spec_decode_tokens=drafts, scheduled_new_reqs=new)
    if plan is not None:
        output.eagle_mrv2_plan = plan
    model_output = SimpleNamespace(
        sampled_token_ids=list((sampled or {}).values()),
        req_id_to_index={name: place for place, name in enumerate(sampled or drafts)},
    )
    original = draft_length.outcome_learned(lambda self, output, model_output: (self, output, model_output))
    assert original(scheduler, output, model_output) == (scheduler, output, model_output)


def test_outcomes_are_counted(choosing: Any) -> None:
    scheduler, chooser = choosing()
    drafts = {"a": [-1] * 3, "b": [-1] * 3, "c": [-1] * 3, "d": [-1] * 2, "not sampled": [-1] * 3, "new": [-1] * 3}
    sampled = {"prefill": [9], "c": [7, 8, 9, 1], "b": [7], "a": [7, 8, 9, 1], "d": [7, 8], "new": [7]}
    learned_from(scheduler, Plan(2, verified=3, decodes=5, prefilled=70), drafts, sampled)
    assert chooser.learned == [(5, 3, 70, {(3, 3): 2, (3, 0): 1, (2, 1): 1})]


def test_an_iteration_that_samples_nothing_has_no_outcomes(choosing: Any) -> None:
    """Of prefill chunks, or on another rank of a pipeline."""
    scheduler, chooser = choosing()
    learned_from(scheduler, Plan(2, 3, 1, 0), {"a": [-1] * 3}, None)
    assert chooser.learned == [(1, 3, 0, {})]


def test_nothing_is_learned_from_what_was_not_planned(choosing: Any) -> None:
    scheduler, chooser = choosing()
    learned_from(scheduler, None, {"a": [-1] * 3}, {"a": [7, 8]})
    assert chooser.learned == []


def test_the_real_chooser_learns() -> None:
    scheduler = scheduler_of(config_of(), a=(20, 21))
    chooser: Any = draft_length.chooser_of(scheduler)
    plan = plan_of(scheduler, a=4)
    learned_from(scheduler, plan, {"a": [-1] * 3}, {"a": [7, 8, 9, 1]})
    assert chooser.acceptance.tokens(3) > 1 + 0.7 + 0.7**2 + 0.7**3


# The workers


def test_the_batch_carries_the_plan() -> None:
    plan = Plan(2, verified=3, decodes=1, prefilled=0)
    output, batch = SimpleNamespace(eagle_mrv2_plan=plan), SimpleNamespace()
    prepare_inputs = draft_length.plan_passed_on(lambda self, output, *args, **kwargs: (args, kwargs) and batch)
    assert prepare_inputs(None, output, 1, two=2) is batch
    assert planned_drafts(batch) == 2


def test_a_batch_without_a_plan_stays_as_it_is() -> None:
    batch = SimpleNamespace()
    prepare_inputs = draft_length.plan_passed_on(lambda self, output: batch)
    assert prepare_inputs(None, SimpleNamespace()) is batch
    assert vars(batch) == {}
    assert planned_drafts(batch) is None
    no_batch = draft_length.plan_passed_on(lambda self, output: None)
    assert no_batch(None, SimpleNamespace(eagle_mrv2_plan=Plan(2, 3, 1, 0))) is None


# CUDA graphs

SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""vLLM's own."""


@pytest.fixture
def make_manager(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes vLLM's manager of CUDA graphs, with or without ours."""
    cudagraph_utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    manager_class = cudagraph_utils.CudaGraphManager
    stock = inspect.unwrap(manager_class._init_candidates)  # a test before may have applied our patches

    def make(
        config: Any,
        requests: int,
        mode: str = "FULL_DECODE_ONLY",
        *,
        query_len: int | None = None,
        loras: list[int] | None = None,
        sizes: list[int] = SIZES,
        ours: bool = True,
    ) -> Any:
        from vllm.config.compilation import CUDAGraphMode

        most = config.speculative_config.num_speculative_tokens
        config.num_speculative_tokens = most
        config.scheduler_config = SimpleNamespace(max_num_seqs=requests)
        config.cache_config = SimpleNamespace(use_kda_recoverssm=False)
        config.compilation_config = SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=0)
        )
        with monkeypatch.context() as patched:
            if ours:
                patched.setattr(manager_class, "_init_candidates", draft_length.graphs_of_every_length(stock))
            manager = manager_class(
                config, "cpu", CUDAGraphMode[mode], 1 + most if query_len is None else query_len, loras
            )
        manager._graphs_captured = True
        return manager

    return make


def same_graphs(one: Any, other: Any) -> bool:
    return (one._capture_descs, one._candidates) == (other._capture_descs, other._candidates)


MODES = ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("most", "requests"), [(1, 128), (2, 160), (5, 64), (7, 64), (9, 8), (3, 1)])
def test_every_batch_has_a_graph_of_its_length(most: int, requests: int, mode: str, make_manager: Any) -> None:
    config = config_of(most)
    manager = make_manager(config, requests, mode)
    for length, batch in itertools.product(lengths_to_choose_from(config)[:-1], range(1, requests + 1)):
        query_len = 1 + length
        graph = manager.dispatch(batch, batch * query_len, query_len, 0)
        assert graph.cg_mode.name == "FULL"
        assert graph.uniform_token_count == query_len
        assert graph.num_tokens == graph.num_reqs * query_len
        assert batch <= graph.num_reqs <= min(1.34 * batch, requests)
        assert graph in manager._capture_descs[graph.cg_mode]


@pytest.mark.parametrize("requests", [9, 50, 100, 200])
def test_the_largest_batch_has_a_graph(requests: int, make_manager: Any) -> None:
    """Whatever max_num_reqs is."""
    manager = make_manager(config_of(1), requests)
    assert manager.dispatch(requests, requests, 1, 0).cg_mode.name == "FULL"


@pytest.mark.parametrize("mode", [*MODES, "FULL", "PIECEWISE"])
@pytest.mark.parametrize("loras", [None, [0, 1, 4]], ids=["no LoRA", "LoRA"])
def test_the_graphs_of_the_maximum_stay(loras: list[int] | None, mode: str, make_manager: Any) -> None:
    stock = make_manager(config_of(chosen=False), 32, mode, loras=loras)
    manager = make_manager(config_of(), 32, mode, loras=loras)
    for graph_mode, graphs in stock._capture_descs.items():
        captured = manager._capture_descs[graph_mode]
        assert [graph for graph in captured if graph in graphs] == graphs
        assert len(captured) == len(set(captured))
        sizes = [graph.num_tokens for graph in captured]
        assert sizes == sorted(sizes, reverse=True), "memory is shared best when the largest is captured first"
    assert manager._capture_descs.keys() == stock._capture_descs.keys()
    for active, tokens, uniform in itertools.product((0, 1, 3), range(1, 520), (6, None)):
        batch = max(tokens // 6, 1), tokens, uniform, active
        assert manager.dispatch(*batch) == stock.dispatch(*batch)


@pytest.mark.parametrize("active", [0, 1, 3])
def test_graphs_for_every_number_of_loras(active: int, make_manager: Any) -> None:
    manager = make_manager(config_of(), 16, loras=[0, 1, 4])
    for batch in range(1, 17):
        graph = manager.dispatch(batch, batch * 3, 3, active)
        assert (graph.cg_mode.name, graph.uniform_token_count) == ("FULL", 3)
        assert graph.num_active_loras == {0: 0, 1: 1, 3: 4}[active]


def test_the_manager_is_as_before_but_for_its_graphs(make_manager: Any) -> None:
    sizes = list(SIZES)
    stock = make_manager(config_of(chosen=False), 32, sizes=sizes)
    manager = make_manager(config_of(), 32, sizes=sizes)
    assert manager.decode_query_len == 6
    assert manager.compilation_config.cudagraph_capture_sizes is sizes
    assert sizes == SIZES
    assert vars(manager).keys() == vars(stock).keys()


def test_no_graph_is_larger_than_the_largest_size(make_manager: Any) -> None:
    manager = make_manager(config_of(), 64, sizes=[1, 2, 4, 8, 16])
    tokens = [graph.num_tokens for graphs in manager._capture_descs.values() for graph in graphs]
    assert max(tokens) <= 16
    assert manager.dispatch(4, 16, 4, 0).num_reqs == 4
    assert manager.dispatch(5, 20, 4, 0).cg_mode.name == "NONE"


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (config_of(), {"query_len": 1}),
        (config_of(chosen=False), {}),
        (config_of(ranks=2, experts=True), {}),
        (config_of(), {"sizes": []}),
        (config_of(), {"mode": "NONE"}),
    ],
    ids=["draft decodes", "constant", "ranks", "no sizes", "no graphs"],
)
def test_a_manager_that_is_left_alone(config: Any, how: dict[str, Any], make_manager: Any) -> None:
    assert same_graphs(make_manager(config, 32, **how), make_manager(config, 32, **how, ours=False))


class Graph(NamedTuple):
    """A descriptor below 0.24, where there is no LoRA."""

    num_tokens: int
    num_reqs: int
    uniform_token_count: int


class ListManager:
    """A manager whose candidates are a list by number of tokens."""

    def __init__(self, init_candidates: Callable[[Any], None]) -> None:
        self.vllm_config = config_of(2)
        self.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[3, 6, 12])
        self.max_num_reqs, self.decode_query_len = 8, 3
        self._candidates: list[list[Graph]] = []
        self._capture_descs: dict[str, list[Graph]] = {}
        init_candidates(self)

    def graphs_of(self, tokens: int, query_len: int) -> Iterator[Graph]:
        return (each for each in self._candidates[tokens] if each.uniform_token_count == query_len)


def list_candidates(self: Any) -> None:
    """Each size holds the batches of more tokens than the one before."""
    for size in self.compilation_config.cudagraph_capture_sizes:
        graph = Graph(size, size // self.decode_query_len, self.decode_query_len)
        self._capture_descs.setdefault("FULL", []).insert(0, graph)
        self._candidates += [[graph]] * (size + 1 - len(self._candidates))


def test_candidates_by_number_of_tokens_only() -> None:
    """As below 0.24."""
    manager = ListManager(draft_length.graphs_of_every_length(list_candidates))
    for query_len, batch in itertools.product((1, 2), range(1, 7)):
        graph = next(manager.graphs_of(batch * query_len, query_len))
        assert graph == (batch * query_len, batch, query_len)
    for tokens, graph in ((3, Graph(3, 1, 3)), (6, Graph(6, 2, 3)), (9, Graph(12, 4, 3)), (12, Graph(12, 4, 3))):
        assert list(manager.graphs_of(tokens, 3)) == [graph]
    assert [each.num_reqs for each in manager._capture_descs["FULL"] if each.uniform_token_count == 3] == [4, 2, 1]
    assert manager.compilation_config.cudagraph_capture_sizes == [3, 6, 12]
