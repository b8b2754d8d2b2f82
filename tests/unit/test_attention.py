"""Which attention layers of a draft become ours, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_eagle_mrv2.draft_model import attention
from vllm_eagle_mrv2.draft_model.attention import DecodeMetadata
from vllm_eagle_mrv2.draft_model.rows_read import RowsRead
from vllm_eagle_mrv2.kernels import single_token_attention
from vllm_eagle_mrv2.kernels.single_token_attention import rotated_reference, single_token_attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, WIDTH, BLOCK = 4, 2, 16, 16
LENGTHS = [5, 40, 0]


class Impl:
    """As vLLM's, as far as it is looked at."""

    num_heads, num_kv_heads, head_size, scale = HEADS, KV_HEADS, WIDTH, 0.25
    alibi_slopes, sliding_window, logits_soft_cap, sinks = None, (-1, -1), 0, None
    attn_type, kv_cache_dtype = "decoder", "auto"

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any) -> Any:
        return output.fill_(7)

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        kv_cache.fill_(7)


class Layer(nn.Module):
    layer_name = "draft.0"

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.impl = Impl()
        for name, value in how.items():
            setattr(self.impl, name, value)


@pytest.fixture(autouse=True)
def _as_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FLASH_ATTENTION", f"{Impl.__module__}.{Impl.__qualname__}")
    monkeypatch.setattr(attention, "_LAYER", f"{Layer.__module__}.{Layer.__qualname__}")
    if DEVICE.type == "cpu":  # programs run one after the other
        monkeypatch.setattr(single_token_attention, "multiprocessors", lambda device: 8)


def metadata(**changed: Any) -> Any:
    return SimpleNamespace(
        **{
            "max_query_len": 1,
            "use_cascade": False,
            "causal": True,
            "num_actual_tokens": len(LENGTHS),
            "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
            "block_table": torch.arange(9, dtype=torch.int32, device=DEVICE).view(3, 3),
            **changed,
        }
    )


def attend(layer: Layer, form: str, of_batch: Any, *, profiled: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer gives for a batch, and what it should."""
    generator = torch.Generator().manual_seed(1)
    caches = torch.randn(2, 9, BLOCK, KV_HEADS, WIDTH, generator=generator).to(DEVICE, torch.float16)
    query = torch.randn(4, HEADS, WIDTH, generator=generator).to(DEVICE, torch.float16)
    kv_cache = {
        "two first": caches,
        "blocks first": caches.transpose(0, 1).contiguous(),
        "one row": torch.cat((*caches,), dim=-1).transpose(1, 2).contiguous(),
    }[form]
    output = torch.zeros(4, HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
    if profiled:
        layer.impl.forward(layer, query, None, None, kv_cache, None, output.clone())
    layer.impl.forward(layer, query, None, None, kv_cache, of_batch, output)
    lengths = torch.tensor(LENGTHS)
    return output, single_token_attention_reference(
        query[:3], caches[0], caches[1], metadata().block_table, lengths, 0.25
    )


def own_metadata() -> DecodeMetadata:
    batch = metadata()
    return DecodeMetadata(len(LENGTHS), batch.seq_lens, batch.block_table)


@pytest.mark.parametrize("of_batch", [metadata, own_metadata])
@pytest.mark.parametrize("form", ["two first", "blocks first", "one row"])
def test_one_token_a_request(form: str, of_batch: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_two_come_first", lambda: form == "two first")
    layer = Layer()
    assert attention.install(nn.ModuleList([layer]), nn.Module())
    output, expected = attend(layer, form, of_batch())
    torch.testing.assert_close(output[:3].float(), expected, rtol=0.01, atol=0.01)
    assert not output[3:].any()


def test_a_worker_that_joins_later_has_no_profile_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As elastic expert parallelism adds them."""
    monkeypatch.setattr(attention, "_two_come_first", lambda: True)
    layer = Layer()
    attention.install(nn.ModuleList([layer]), nn.Module())
    output, expected = attend(layer, "two first", own_metadata(), profiled=False)
    torch.testing.assert_close(output[:3].float(), expected, rtol=0.01, atol=0.01)


def test_scratch_memory_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dummy run has no metadata either, and an idle data-parallel rank makes one a step."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention, "SingleTokenAttention", lambda *shape: made.append(shape))
    layers = [Layer(), Layer()]
    attention.install(nn.ModuleList(layers), nn.Module())
    query = torch.zeros(4, HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
    for layer in layers * 2:
        layer.impl.forward(layer, query, None, None, None, None, query.clone())
    assert made == [(HEADS, KV_HEADS, WIDTH, query.device)]


@pytest.mark.parametrize(
    ("of_batch", "dtype", "ours"),
    [
        (own_metadata, torch.float16, True),
        (own_metadata, torch.float32, False),  # a cache of another dtype
        (metadata, torch.float16, False),  # may be in a graph that holds the write and not attention
        (lambda: None, torch.float16, False),
    ],
)
def test_who_writes_the_cache(
    of_batch: Callable[[], Any], dtype: torch.dtype, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention does where vLLM was kept from it, and nowhere else."""
    context = SimpleNamespace(attn_metadata={Layer.layer_name: of_batch()})
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    monkeypatch.setattr(attention, "_two_come_first", lambda: True)
    layer = Layer()
    attention.install(nn.ModuleList([layer]), nn.Module())
    cache = torch.zeros(2, 9, BLOCK, KV_HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
    query, output = torch.zeros(2, 4, HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
    key = torch.ones(4, KV_HEADS, WIDTH, dtype=dtype, device=DEVICE)
    slots = torch.tensor([4, 5 * BLOCK + 7, -1, -1], device=DEVICE)
    layer.impl.forward(layer, query, None, None, cache, None, output)  # the profile run
    for _ in range(2):
        cache.zero_()
        layer.impl.do_kv_cache_update(layer, key, 2 * key, cache, slots)
        assert bool(cache.any()) is not ours
        layer.impl.forward(layer, query, key, 2 * key, cache, of_batch(), output)
        if not ours:
            assert (cache == 7).all()
            continue
        written = cache.flatten(1, 2)[:, slots[:2]]
        assert (written == torch.tensor([1, 2], device=DEVICE).view(2, 1, 1, 1)).all()
        assert int(cache.count_nonzero()) == written.numel()


@pytest.mark.parametrize("form", ["blocks first", "one row"])
def test_flashinfer(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata is for itself; its implementation has no type of attention, and its caches the blocks first."""
    monkeypatch.setattr(attention, "_FLASHINFER", attention._FLASH_ATTENTION)
    monkeypatch.setattr(attention, "_FLASH_ATTENTION", "of another backend")
    monkeypatch.setattr(attention, "_two_come_first", lambda: True)
    monkeypatch.delattr(Impl, "attn_type")
    layer = Layer()
    assert attention.install(nn.ModuleList([layer]), nn.Module())
    output, expected = attend(layer, form, own_metadata())
    torch.testing.assert_close(output[:3].float(), expected, rtol=0.01, atol=0.01)
    output, _ = attend(layer, form, SimpleNamespace(num_actual_tokens=3, num_decodes=3))
    assert (output == 7).all()


@pytest.mark.parametrize(
    "other", [{"max_query_len": 2}, {"use_cascade": True}, {"causal": False}, {"num_actual_tokens": 2}]
)
def test_other_batches_are_stocks(other: dict[str, Any]) -> None:
    layer = Layer()
    attention.install(nn.ModuleList([layer]), nn.Module())
    output, _ = attend(layer, "two first", metadata(**other))
    assert (output == 7).all()


@pytest.mark.parametrize(
    "other",
    [
        {"alibi_slopes": torch.ones(4)},
        {"sliding_window": (127, 0)},
        {"logits_soft_cap": 30.0},
        {"sinks": torch.ones(4)},
        {"attn_type": "encoder"},
        {"kv_cache_dtype": "fp8"},
        {"head_size": 80},
        {"dcp_world_size": 2},
        {"batch_invariant_enabled": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_layers_with_more_to_them_are_stocks(other: dict[str, Any]) -> None:
    assert not attention.install(nn.ModuleList([Layer(), Layer(**other)]), nn.Module())


def test_layers_that_change_their_metadata_are_stocks() -> None:
    """Chunked attention and attention to a static sink are subclasses with the same backend."""

    class ChunkedLayer(Layer): ...

    chunked = ChunkedLayer()
    assert not attention.install(nn.ModuleList([Layer(), chunked]), nn.Module())
    assert "forward" not in vars(chunked.impl)


def test_the_targets_layers_stay() -> None:
    layer = Layer()
    assert not attention.install(nn.ModuleList([layer]), nn.ModuleList([layer]))
    assert "forward" not in vars(layer.impl)


class Module(nn.Module):
    """As vLLM's around an attention layer."""

    def __init__(self, rope: dict[str, Any]) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        super().__init__()
        self.attn = Layer()
        self.read = RowsRead(torch.tensor([1], device=DEVICE))
        plain = {"head_size": WIDTH, "rotary_dim": WIDTH, "max_position_embeddings": 64, "is_neox_style": True}
        with set_current_vllm_config(VllmConfig()):
            self.rotary_emb = RotaryEmbedding(**plain | rope, base=100, dtype=torch.float16).to(DEVICE)


def run(module: Module, of_batch: Any, update: bool = True) -> dict[str, torch.Tensor]:
    """One pass over three tokens: what goes in, what the layer's own code was given, and what came of it."""
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(3, (HEADS + 2 * KV_HEADS) * WIDTH, generator=generator).to(DEVICE, torch.float16)
    flat = row.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1)
    found = {"query": flat[0].unflatten(1, (-1, WIDTH)).clone(), "key": flat[1].unflatten(1, (-1, WIDTH)).clone()}
    query, key = module.rotary_emb(torch.zeros(3, dtype=torch.int64, device=DEVICE), flat[0], flat[1])
    query, key, value = (each.unflatten(1, (-1, WIDTH)) for each in (query, key, flat[2]))
    cache = torch.randn(2, 9, BLOCK, KV_HEADS, WIDTH, generator=generator).to(DEVICE, torch.float16)
    output = torch.zeros(3, HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
    impl = module.attn.impl
    impl.forward(module.attn, query, key, value, cache, None, output)  # the profile run turns nothing
    assert key.equal(found["key"])
    if update:
        impl.do_kv_cache_update(module.attn, key, value, cache, torch.tensor([4, 5 * BLOCK + 7, -1], device=DEVICE))
    impl.forward(module.attn, query, key, value, cache, of_batch, output)
    return found | {"given query": query, "given key": key, "value": value, "cache": cache, "output": output}


@pytest.fixture
def rope_is_left(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Module, torch.Tensor]]:
    """Makes a module whose RoPE was left to attention, and the positions that it goes by."""
    monkeypatch.setattr(attention, "_ATTENTION", f"{Module.__module__}.{Module.__qualname__}")
    monkeypatch.setattr(attention, "_two_come_first", lambda: True)
    monkeypatch.setattr(Impl, "do_kv_cache_update", lambda self, *args: None)

    def make(of_batch: Any, **rope: Any) -> tuple[Module, torch.Tensor]:
        context = SimpleNamespace(attn_metadata={Layer.layer_name: of_batch})
        monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        module, positions = Module(rope), torch.tensor([40, 3, 17, 5], device=DEVICE)
        attention.install(nn.ModuleList([module]), nn.Module(), positions=positions, read=module.read)
        return module, positions[:3]

    return make


@pytest.mark.parametrize("batch", [metadata(max_query_len=2), metadata()], ids=["prefill", "one token each"])
def test_nothing_is_attended_to_where_no_row_is_read(batch: Any, rope_is_left: Callable[..., Any]) -> None:
    """Keys and values are written all the same; a layer that writes them while it attends runs as ever."""
    module, _ = rope_is_left(batch)
    profiled = 7  # what the run without metadata leaves
    with module.read.only(0):
        assert (run(module, batch)["output"] == profiled).all()
    attends = batch.max_query_len == 1
    for rows, update in ((0, False), (1, True)):
        with module.read.only(rows):
            assert (run(module, batch, update)["output"] != profiled).any() == attends


@pytest.mark.parametrize("of_batch", [metadata, own_metadata])
def test_our_kernel_turns_by_rope(of_batch: Callable[[], Any], rope_is_left: Callable[..., Any]) -> None:
    """The queries always, and the keys where it writes them."""
    batch = of_batch()
    module, positions = rope_is_left(batch)
    table = module.rotary_emb.stock.cos_sin_cache
    found = run(module, batch)
    key = rotated_reference(found["key"], positions, table)
    writes = isinstance(batch, DecodeMetadata)
    assert found["given query"].equal(found["query"])
    torch.testing.assert_close(found["given key"], found["key"] if writes else key, rtol=0.01, atol=0.01)
    cache = found["cache"].clone()
    for request, place in enumerate([(0, 4), (5, 7)] if writes else []):
        torch.testing.assert_close(cache[0][place], key[request], rtol=0.01, atol=0.01)
        assert cache[1][place].equal(found["value"][request])
    if writes:
        return  # what is attended to is seen in the kernel's own tests
    query = rotated_reference(found["query"], positions, table)
    lengths = torch.tensor(LENGTHS)
    expected = single_token_attention_reference(query, cache[0], cache[1], batch.block_table, lengths, 0.25)
    torch.testing.assert_close(found["output"].float(), expected, rtol=0.01, atol=0.01)


def test_one_row_of_each_request_attends(rope_is_left: Callable[..., Any]) -> None:
    """Of three tokens at positions 40, 3 and 17 the first and the last, which are those of two requests."""
    lengths, table = torch.tensor([43, 18], dtype=torch.int32, device=DEVICE), metadata().block_table[[2, 0]]
    batch = metadata(max_query_len=2, num_actual_tokens=3, seq_lens=lengths, block_table=table)
    module, positions = rope_is_left(batch)
    module.read.index = torch.tensor([0, 2], device=DEVICE)
    with module.read.only(2):
        found = run(module, batch)
    query = rotated_reference(found["query"], positions, module.rotary_emb.stock.cos_sin_cache)[[0, 2]]
    keys, values = found["cache"]
    expected = single_token_attention_reference(query, keys, values, table, positions[[0, 2]] + 1, 0.25)
    torch.testing.assert_close(found["output"][[0, 2]].float(), expected, rtol=0.01, atol=0.01)
    assert (found["output"][1] == 7).all()  # as the profile run left it


def one_request(**changed: Any) -> Any:
    """Three tokens at positions 40, 3 and 17, of which the second is read."""
    changed = {"seq_lens": torch.tensor([43], dtype=torch.int32, device=DEVICE)} | changed
    return metadata(max_query_len=3, num_actual_tokens=3, block_table=metadata().block_table[:1], **changed)


def test_one_row_of_a_request_attends(rope_is_left: Callable[..., Any]) -> None:
    """To what comes before it, by our kernel; keys are turned and written by vLLM."""
    batch = one_request()
    module, positions = rope_is_left(batch)
    with module.read.only(1):
        found = run(module, batch)
    table = module.rotary_emb.stock.cos_sin_cache
    assert found["given query"].equal(found["query"])
    torch.testing.assert_close(
        found["given key"], rotated_reference(found["key"], positions, table), rtol=0.01, atol=0.01
    )
    query = rotated_reference(found["query"], positions, table)[1:2]
    keys, values = found["cache"]
    expected = single_token_attention_reference(query, keys, values, batch.block_table, positions[1:2] + 1, 0.25)
    torch.testing.assert_close(found["output"][1:2].float(), expected, rtol=0.01, atol=0.01)
    assert (found["output"][[0, 2]] == 7).all()  # as the profile run left them
    assert (run(module, batch)["output"] == 7).all()  # all rows are read


@pytest.mark.parametrize(
    "other",
    [{"seq_lens": torch.tensor([3, 3])}, {"use_cascade": True}, {"causal": False}, {"block_table": None}],
    ids=str,
)
def test_one_row_of_another_batch_is_stocks(other: dict[str, Any], rope_is_left: Callable[..., Any]) -> None:
    batch = one_request()
    for name, value in other.items():
        if value is None:  # as FlashInfer's, which has none
            delattr(batch, name)
        else:
            setattr(batch, name, value)
    module, _ = rope_is_left(batch)
    with module.read.only(1):
        assert (run(module, batch)["output"] == 7).all()
    # Where vLLM's attention writes the cache itself, it does.
    module, _ = rope_is_left(one_request())
    with module.read.only(1):
        assert (run(module, one_request(), update=False)["output"] == 7).all()


@pytest.mark.parametrize("update", [True, False])
def test_rope_comes_before_vllms_own_attention(update: bool, rope_is_left: Callable[..., Any]) -> None:
    """Once, whether or not keys are written apart from it."""
    batch = metadata(max_query_len=2)
    module, positions = rope_is_left(batch)
    for _ in range(2):
        found = run(module, batch, update)
        for name in ("query", "key"):
            turned = rotated_reference(found[name], positions, module.rotary_emb.stock.cos_sin_cache)
            torch.testing.assert_close(found[f"given {name}"], turned, rtol=0.01, atol=0.01)
        assert (found["output"] == 7).all()


@pytest.mark.parametrize("other", [{"is_neox_style": False}, {"rotary_dim": WIDTH // 2}], ids=str)
def test_another_rope_stays(other: dict[str, Any], rope_is_left: Callable[..., Any]) -> None:
    module, _ = rope_is_left(own_metadata(), **other)
    assert not isinstance(module.rotary_emb, attention.Rope)


@pytest.mark.parametrize(("max_model_len", "taken"), [(64, True), (65, False)])
def test_a_table_with_fewer_rows_than_positions_stays(
    max_model_len: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel would read beyond it."""
    monkeypatch.setattr(attention, "_ATTENTION", f"{Module.__module__}.{Module.__qualname__}")
    module, positions = Module({"max_position_embeddings": 64}), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    attention.install(nn.ModuleList([module]), nn.Module(), positions=positions, max_model_len=max_model_len)
    assert isinstance(module.rotary_emb, attention.Rope) is taken


def test_without_positions_rope_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_ATTENTION", f"{Module.__module__}.{Module.__qualname__}")
    module = Module({})
    attention.install(nn.ModuleList([module]), nn.Module())
    assert not isinstance(module.rotary_emb, attention.Rope)
