"""Train the demo pair: a small Llama target, an EAGLE head and an EAGLE-3 head.

The three checkpoints are small enough for the repository, and load in stock vLLM. They are trained on the English
prose that ships with Python (PSF licence): the language reference in ``pydoc_data.topics``, docstrings of the standard
library, and Python's LICENSE. Both heads are trained on the rollout that they run at inference: step 1 reads the
target's features, and each later step reads the head's own output of the previous step.

    python tools/train_demo_pair.py --out vllm_eagle_mrv2/demo_pair

In shapes, B is the batch, T the sequence length, H the hidden size, V the vocabulary, D the draft vocabulary, N the
number of attention heads and C the size of one of them.
"""

import argparse
import ast
import dataclasses
import json
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1

# Standard library modules whose docstrings are mostly prose.
DOCSTRING_MODULES = """
    argparse asyncio/locks asyncio/tasks codecs collections/__init__ configparser contextlib csv datetime difflib
    enum functools heapq json/__init__ logging/__init__ os pathlib random shutil statistics string subprocess tempfile
    textwrap threading traceback unittest/case urllib/parse
"""
DRAFT_VOCAB_SIZE = 1024
# Training of the target stops early. Trained to the end, it memorizes its small corpus, and a head of one layer cannot
# predict its continuations of held-out prompts.
TARGET_STEPS, TARGET_LEARNING_RATE = 170, 1.5e-2
HEAD_STEPS, HEAD_LEARNING_RATE = 3500, 4e-3
# EAGLE-3 reads the residual stream after this many layers of the target. vLLM's default gives three different layers
# only for at least seven layers, and not every release captures the stream after the last layer.
AUX_LAYER_IDS = (1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the target, under their names in config.json; a head has the same sizes and one layer."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 448
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


# Corpus and tokenizer


def prose_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of running English, each unwrapped to one line; code, tables and headings are left out."""
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        letters = sum(character.isalpha() or character == " " for character in line)
        is_prose = letters >= 0.85 * len(line) and line.count(" ") >= 7 and line[-1:] in ".:;)"
        if is_prose and ">>>" not in line and line.isascii():
            yield re.sub(r"^[*+-] |:\w+:(?=`)|`+", "", line)


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Docstrings of a module in source order."""
    if isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(tree) or ""
    for child in ast.iter_child_nodes(tree):
        yield from docstrings(child)


def module_tree(name: str) -> ast.Module:
    """A module of the standard library, named by its path without ``.py``."""
    return ast.parse(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_bytes())


def module_text(name: str) -> str:
    """All docstrings of a module of the standard library."""
    return "\n\n".join(docstrings(module_tree(name)))


def load_documents(modules: Iterable[str] = DOCSTRING_MODULES.split()) -> list[str]:
    """All documents of the corpus in a fixed order."""
    sources = [topics[name] for name in sorted(topics)]
    sources += map(module_text, modules)
    sources.append(Path(sysconfig.get_path("stdlib"), "LICENSE.txt").read_text(encoding="utf-8"))
    return documents_of(sources)


def documents_of(sources: Iterable[str]) -> list[str]:
    """The prose of each source, a paragraph a line; repeated paragraphs are kept at their first occurrence only."""
    seen: set[str] = set()
    documents = []
    for source in sources:
        paragraphs = [p for p in dict.fromkeys(prose_paragraphs(source)) if p not in seen]
        seen.update(paragraphs)
        if paragraphs:
            documents.append("\n".join(paragraphs))
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE that puts BOS before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def choose_prompts(documents: list[str], tokenizer: Tokenizer, count: int, rng: random.Random) -> list[str]:
    """Beginnings of ``count`` paragraphs of 20 to 60 tokens, spread over the documents and cut between words."""
    candidates = [p for document in documents for p in document.split("\n") if len(tokenizer.encode(p).ids) > 70]
    prompts = []
    for index in range(count):
        words = candidates[index * len(candidates) // count].split(" ")
        length = rng.randint(20, 55)
        while len(tokenizer.encode(" ".join(words)).ids) > length:
            words.pop()
        prompts.append(" ".join(words))
    return prompts


# Models. Parameter names are those of the checkpoints.

# (query, key, value), each [B, N, T, C] -> [B, N, T, C]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class DecodeCache:
    """Attention of one layer during generation: a causal prefill, then one token per call."""

    def __init__(self) -> None:
        self.past: tuple[Tensor, Tensor] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        past, is_causal = self.past, self.past is None
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        self.past = key, value
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


class RolloutCache:
    """Attention of a head when every position of a sequence starts its own draft.

    Row i of the first call is the draft prefill at position i. Row i of a later call is a later step of the draft
    that started there: it attends to the prefill up to i, and to the later steps of its own draft only.
    """

    def __init__(self) -> None:
        self.past: list[tuple[Tensor, Tensor]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.past.append((key, value))
        (first_key, first_value), *own = self.past
        if not own:
            return causal_attention(query, key, value)
        length = query.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        prefill_scores = (query @ first_key.mT).masked_fill(future, float("-inf"))
        own_scores = [(query * own_key).sum(-1, keepdim=True) for own_key, _ in own]
        # [B, N, T, T + len(own)]
        weights = (torch.cat([prefill_scores, *own_scores], dim=-1) * query.shape[-1] ** -0.5).softmax(-1)
        weights = weights.to(value.dtype)
        output: Tensor = weights[..., :length] @ first_value
        for column, (_, own_value) in enumerate(own, start=length):
            output = output + weights[..., column, None] * own_value
        return output


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply RoPE in the NeoX style (rotated halves); x [B, N, T, C], positions [T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(input_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, T, input size], positions [T] -> [B, T, H]"""
        shape = self.shape
        query, key, value = (
            projection(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, positions, shape.rope_theta), rotate(key, positions, shape.rope_theta)
        group = shape.num_attention_heads // shape.num_key_value_heads
        output = attend(query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        projected: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class DecoderLayer(nn.Module):
    """A Llama layer. In an EAGLE head it has no input norm; in an EAGLE-3 head it also reads embeddings."""

    def __init__(self, shape: Shape, input_norm: bool = True, reads_embeddings: bool = False) -> None:
        super().__init__()
        norm_size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(norm_size, eps) if input_norm else nn.Identity()
        if reads_embeddings:
            self.hidden_norm = nn.RMSNorm(norm_size, eps)
        self.self_attn = Attention(shape, input_size=norm_size * (2 if reads_embeddings else 1))
        self.post_attention_layernorm = nn.RMSNorm(norm_size, eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, embeddings: Tensor | None = None) -> Tensor:
        """x and embeddings [B, T, H], positions [T] -> [B, T, H]"""
        x = x.float()  # the residual stream stays in float32 under autocast
        if embeddings is None:
            attention_input = self.input_layernorm(x)
        else:
            attention_input = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(x)], dim=-1)
        x = x + self.self_attn(attention_input, positions, attend)
        after: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return after


class Target(nn.Module):
    """LlamaForCausalLM with tied embeddings.

    Args:
        aux_layers: EAGLE-3 reads the residual stream after so many layers.
    """

    def __init__(self, shape: Shape, aux_layers: tuple[int, ...] = AUX_LAYER_IDS) -> None:
        super().__init__()
        self.shape, self.aux_layers = shape, aux_layers
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, tokens: Tensor, caches: list[DecodeCache] | None = None, start: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> final hidden states [B, T, H] and the residual streams that EAGLE-3 reads, each [B, T, H]"""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        aux = []
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, caches[index] if caches else causal_attention)
            if index + 1 in self.aux_layers:
                aux.append(x)
        return self.norm(x), aux

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, V]"""
        return F.linear(hidden, self.embed_tokens.weight)


class EagleHead(nn.Module):
    """EAGLE: regresses the target's final hidden states, and shares its embedding and output matrix."""

    draft_ids: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape, input_norm=False)])
        self.register_buffer("draft_ids", torch.arange(shape.vocab_size), persistent=False)

    def first_features(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        return hidden

    def step(
        self, target: Target, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, T], features [B, T, H] -> features of the next step [B, T, H] and logits [B, T, V]"""
        x = self.fc(torch.cat([target.embed_tokens(tokens), features], dim=-1))
        features = self.layers[0](x, positions, attend)
        return features, target.logits(features)


class Eagle3Head(nn.Module):
    """EAGLE-3: reads three residual streams of the target and predicts over its own draft vocabulary, draft_ids [D]."""

    draft_ids: Tensor

    def __init__(self, shape: Shape, draft_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(AUX_LAYER_IDS) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = DecoderLayer(shape, reads_embeddings=True)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(draft_ids), bias=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, True))

    def first_features(self, hidden: Tensor, aux: list[Tensor]) -> Tensor:
        combined: Tensor = self.fc(torch.cat(aux, dim=-1))
        return combined

    def step(
        self, target: Target, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, T], features [B, T, H] -> features of the next step [B, T, H] and logits [B, T, D]"""
        features = self.midlayer(features, positions, attend, target.embed_tokens(tokens))
        return features, self.lm_head(self.norm(features))


Head = EagleHead | Eagle3Head


# Training


def train(
    model: nn.Module, loss_of_batch: Callable[[], Tensor], name: str, steps: int, peak_lr: float, seconds: float
) -> None:
    """Update ``model`` for ``steps`` updates or ``seconds``, whichever ends first; the learning rate is then zero."""
    parameters = dict(model.named_parameters())
    matrices = [n for n, p in parameters.items() if p.ndim == 2 and not n.startswith(("embed_tokens", "lm_head"))]
    others = [p for n, p in parameters.items() if n not in matrices]
    optimizers = [
        torch.optim.Muon([parameters[n] for n in matrices], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    device_type = next(model.parameters()).device.type
    began = time.monotonic()
    bar = tqdm(range(steps), desc=name, mininterval=2.0)
    for step in bar:
        progress = max(step / steps, (time.monotonic() - began) / seconds)
        if progress >= 1.0:
            break
        for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = peak_lr * min(1.0, (step + 1) / 30, 1.4 * (1.0 - progress))
        with torch.autocast(device_type, torch.bfloat16):
            loss = loss_of_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    # The checkpoints are stored in bfloat16: the next training must use the rounded weights.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.requires_grad_(False)


def sample_windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows [count, length] of the token stream, each starting with BOS."""
    starts = torch.randint(len(stream) - length, (count, 1), generator=generator)
    windows = stream[starts + torch.arange(length)]
    windows[:, 0] = BOS_ID
    return windows


def target_loss(target: Target, tokens: Tensor) -> Tensor:
    logits = target.logits(target(tokens)[0])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def rollout(
    target: Target, head: Head, tokens: Tensor, hidden: Tensor, aux: list[Tensor], depth: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draft ``depth`` tokens from every position of tokens [B, T], as the engine does if all of them are accepted.

    Step k, from 1, reads token i + k, and yields the head's features and logits for i in [0, T - depth); hidden and aux
    are what the target makes of the tokens. The features should match hidden at i + k.
    """
    length = tokens.shape[1] - depth
    cache = RolloutCache()
    features = head.first_features(hidden, aux)[:, :length]
    for k in range(1, depth + 1):
        positions = torch.arange(k - 1, k - 1 + length, device=tokens.device)
        features, logits = head.step(target, tokens[:, k : k + length], features, positions, cache)
        yield features, logits


def head_loss(target: Target, head: Head, tokens: Tensor, depth: int, counts: Tensor | None = None) -> Tensor:
    """Cross entropy with the target's own distribution at every step; later steps have less weight.

    Args:
        counts: bool [B, T], whether the token that the target predicts at a position counts; None for all of them.
    """
    with torch.no_grad():
        hidden, aux = target(tokens)
        target_logits = target.logits(hidden).float()
        known = torch.isin(target_logits.argmax(-1), head.draft_ids).float()
        if counts is not None:
            known = known * counts
        probabilities = target_logits[..., head.draft_ids].softmax(-1)
    loss = torch.zeros((), device=tokens.device)
    for k, (features, logits) in enumerate(rollout(target, head, tokens, hidden, aux, depth), start=1):
        drafted = slice(k, k + logits.shape[1])
        entropy = -(probabilities[:, drafted] * logits.float().log_softmax(-1)).sum(-1)
        step_loss = (entropy * known[:, drafted]).sum() / known[:, drafted].sum().clamp(min=1)
        if isinstance(head, EagleHead):
            step_loss = step_loss + 0.2 * F.smooth_l1_loss(features.float(), hidden[:, drafted].float())
        loss = loss + 0.8 ** (k - 1) * step_loss
    return loss


# Generation and measurement


@torch.inference_mode()
def generate(target: Target, prompts: Tensor, length: int, sampled: Tensor, generator: torch.Generator) -> Tensor:
    """Continue prompts [B, P] to [B, length]; row b samples sampled[b] new tokens, and is then greedy."""
    caches = [DecodeCache() for _ in target.layers]
    tokens, new = prompts, prompts
    for step in range(length - prompts.shape[1]):
        logits = target.logits(target(new, caches, start=tokens.shape[1] - new.shape[1])[0][:, -1]).float()
        draws = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(tokens.device)
        new = torch.where(step < sampled[:, None], draws, logits.argmax(-1, keepdim=True))
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


@torch.inference_mode()
def measure(target: Target, head: Head, prompts: list[list[int]], new_tokens: int = 64, depth: int = 3) -> list[float]:
    """Share of drafts accepted at each of ``depth`` positions over greedy texts, as the engine counts it."""
    device = head.fc.weight.device
    accepted: list[int] = []
    for prompt in prompts:
        greedy = torch.zeros(1, dtype=torch.long, device=device)
        tokens = torch.tensor([prompt], device=device)
        tokens = generate(target, tokens, len(prompt) + new_tokens, greedy, torch.Generator())
        hits = []
        hidden, aux = target(tokens)
        for k, (_, logits) in enumerate(rollout(target, head, tokens, hidden, aux, depth), start=1):
            drafts = head.draft_ids[logits.argmax(-1)[0, :-1]]
            hits.append(drafts == tokens[0, k + 1 : k + 1 + len(drafts)])
        accepted_from = torch.stack(hits).long().cumprod(0).sum(0).tolist()
        position = len(prompt) - 1
        while position < len(accepted_from):
            accepted.append(accepted_from[position])
            position += accepted[-1] + 1
    return [sum(count > k for count in accepted) / len(accepted) for k in range(depth)]


# Checkpoints


def llama_config(shape: Shape, architecture: str, **fields: object) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **dataclasses.asdict(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "bfloat16",
        **fields,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_model(folder: Path, model: nn.Module, config: dict[str, object], prefix: str = "") -> None:
    """Write config.json and model.safetensors, with floating point tensors as bfloat16."""
    tensors = {
        prefix + name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Not save_file, which makes files that only the owner can read.
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", config)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("vllm_eagle_mrv2/demo_pair"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=12.0, help="budget; steps left when it runs out are dropped")
    parser.add_argument("--keep-target", action="store_true", help="train new heads for the target found in --out")
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--head-steps", type=int, default=HEAD_STEPS)
    parser.add_argument("--depth", type=int, default=4, help="steps of the training rollout")
    parser.add_argument("--texts", type=int, default=3000, help="texts generated by the target to train the heads on")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    shape = Shape()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)

    documents = load_documents()
    held_out = documents[7::12]
    training = [document for index, document in enumerate(documents) if index % 12 != 7]
    tokenizer = train_tokenizer(training, shape.vocab_size)
    encoded = [[BOS_ID, *tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID] for text in training]
    stream = torch.tensor(list(chain.from_iterable(encoded)))
    prompts = choose_prompts(held_out, tokenizer, args.prompts, random.Random(args.seed))
    print(f"{len(training)} documents, {len(stream)} tokens, {len(held_out)} documents held out")

    target = Target(shape).to(device)
    nn.init.normal_(target.embed_tokens.weight, std=0.02)

    def target_batch_loss() -> Tensor:
        return target_loss(target, sample_windows(stream, 16, 256, generator).to(device))

    if args.keep_target:
        weights = load_file(args.out / "target" / "model.safetensors", device=str(device))
        target.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
        target.requires_grad_(False)
    else:
        train(target, target_batch_loss, "target", args.target_steps, TARGET_LEARNING_RATE, args.minutes * 60 * 0.2)
        save_tokenizer(args.out / "target", tokenizer, shape.max_position_embeddings)
        config = llama_config(shape, "LlamaForCausalLM", tie_word_embeddings=True)
        save_model(args.out / "target", target, config, prefix="model.")
        write_json(args.out / "prompts.json", prompts)

    # Half of the texts start with sampled tokens, which leave the corpus as held-out prompts do, and then turn greedy.
    texts = []
    for _ in tqdm(range(args.texts // 64), desc="texts"):
        prompt = sample_windows(stream, 64, 24, generator).to(device)
        sampled = torch.randint(-24, 24, (64,), generator=generator).to(device)
        sampled[:8] = 256
        with torch.autocast(device.type, torch.bfloat16):
            texts.append(generate(target, prompt, 256, sampled, generator))
    written = torch.cat(texts)

    counts = torch.bincount(torch.cat([stream, written.flatten().cpu()]), minlength=shape.vocab_size)
    draft_ids = counts.topk(DRAFT_VOCAB_SIZE).indices.sort().values
    heads: dict[str, Head] = {"eagle": EagleHead(shape).to(device), "eagle3": Eagle3Head(shape, draft_ids).to(device)}

    def head_batch_loss(head: Head) -> Tensor:
        rows = torch.randint(len(written), (6,), generator=generator).to(device)
        tokens = torch.cat([written[rows], sample_windows(stream, 2, 256, generator).to(device)])
        return head_loss(target, head, tokens, args.depth)

    head_shape = dataclasses.replace(shape, num_hidden_layers=1)
    configs = {
        "eagle": llama_config(head_shape, "LlamaForCausalLM"),
        "eagle3": llama_config(
            head_shape,
            "LlamaForCausalLMEagle3",
            draft_vocab_size=DRAFT_VOCAB_SIZE,
            eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS),
        ),
    }

    for name, head in heads.items():
        train(head, partial(head_batch_loss, head), name, args.head_steps, HEAD_LEARNING_RATE, args.minutes * 60 * 0.4)
        rates = measure(target, head, [tokenizer.encode(prompt).ids for prompt in prompts])
        save_model(args.out / name, head, configs[name])
        print(f"{name}: acceptance length {1 + sum(rates):.3f}, by position {[round(rate, 3) for rate in rates]}")


if __name__ == "__main__":
    main()
