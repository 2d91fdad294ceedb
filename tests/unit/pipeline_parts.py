"""What the tests of the people's side share: a small tokenizer folder, datasets, settings, a runner for the command."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.children import RunLock
from schemas.settings import Settings

CHAT = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
MODEL_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 4096,
}


@contextmanager
def supervised(run_dir: Path) -> Iterator[None]:
    """A run that its supervisor works on: this process."""
    lock = RunLock(run_dir)
    lock.take()
    lock.note(broker="in memory")
    try:
        yield
    finally:
        lock.release()


def write_model(folder: Path) -> Path:
    """A folder that passes for a model as long as nobody computes: config, byte tokenizer, chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<u>", "<a>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return folder


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def some_rows(count: int, word: str = "row") -> list[dict[str, Any]]:
    return [{"prompt": f"{word} {number}", "answer": str(number)} for number in range(count)]


def a_config(folder: Path, **changes: Any) -> Path:
    """A valid configuration in `folder`, with paced parts; `changes` are top-level keys."""
    import tomli_w

    model = folder / "model"
    if not model.exists():
        write_model(model)
        write_rows(folder / "rows.jsonl", some_rows(7))
    tree: dict[str, Any] = {
        "model": str(model),
        "runs_dir": str(folder / "runs"),
        "steps": 2,
        "group_size": 2,
        "groups_per_batch": 2,
        "engines": {"kind": "paced", "count": 2, "seats": 4},
        "training": {"kind": "paced"},
        "prefect": {"enabled": False},
        "sampling": {"max_new_tokens": 8},
        "dataset": [{"path": "rows.jsonl"}],
        **changes,
    }
    file = folder / "small.toml"
    file.write_text(tomli_w.dumps(tree))
    return file


def some_settings(folder: Path, **changes: Any) -> Settings:
    """Those of `a_config`, named `r`, resolved."""
    from pipelines.config_file import read_settings

    return read_settings(a_config(folder, name="r", **changes))
