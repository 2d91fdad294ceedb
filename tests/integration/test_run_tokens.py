"""Prompts are tokenised as transformers would do it."""

from pathlib import Path

import pytest

from pipelines.models import write_tiny
from pipelines.tokens import PromptTokenizer
from pipelines.validate import MODELS_CACHE, resolve

pytestmark = pytest.mark.integration
TEXTS = ("What is 7 * 8? Answer with the number only.", "été – 日本\n\n  two lines ", "<|user|> said")


def _same(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = PromptTokenizer(folder)
    for text in TEXTS:
        turn = [{"role": "user", "content": text}]
        chat = theirs.apply_chat_template(turn, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ours.ids(text, "chat") == list(chat)
        assert ours.ids(text, "plain") == list(theirs(text)["input_ids"])


def test_the_tiny_models_prompts_have_the_ids_of_transformers(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    _same(tmp_path / "tiny")


def test_the_quickstart_models_prompts_have_the_ids_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    _same(resolve("builtin:smollm2"))
    assert MODELS_CACHE.is_dir()
