"""Prompt text -> token ids, without torch: the folder's own `tokenizer.json` and chat template.

The library `tokenizers` and the template are what transformers would use (a test compares them), but they load in a
fraction of a second; a folder without `tokenizer.json` is read with transformers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from workers.runtime.errors import BadInput

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class PromptTokenizer:
    """`ids(prompt, template)`. BadInput if the folder has no tokenizer, or no chat template where one is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._slow: Any = None
        self._fast: Any = None
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            try:
                self._fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception as error:  # the library raises nothing narrower
                raise BadInput(f"model: {folder / 'tokenizer.json'} cannot be read: {error}") from error
            self._fast.no_truncation()
            self._fast.no_padding()
        elif (folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            self._slow = AutoTokenizer.from_pretrained(str(folder))
        else:
            raise BadInput(f"model: {folder} has no tokenizer (tokenizer.json or tokenizer_config.json)")
        self._config = _read_config(folder)
        self._template: Any = None

    def ids(self, prompt: str, template: Literal["chat", "plain"]) -> list[int]:
        """Token ids of one user turn with the generation prompt (`chat`), or of the bare text (`plain`)."""
        text, special = self.rendered(prompt, template), template == "plain"
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        return list(self._slow(text, add_special_tokens=special)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """What these ids say, special tokens included."""
        decode = self._slow if self._fast is None else self._fast
        return str(decode.decode(list(ids), skip_special_tokens=False))

    def rendered(self, prompt: str, template: Literal["chat", "plain"]) -> str:
        """The text that `ids` are the tokens of."""
        return self._chat(prompt) if template == "chat" else prompt

    def _chat(self, prompt: str) -> str:
        if self._template is None:
            self._template = _compile(self._source())
        named = {name: value for name in _SPECIAL if (value := _content(self._config.get(name)))}
        messages = [{"role": "user", "content": prompt}]
        return str(self._template.render(messages=messages, add_generation_prompt=True, **named))

    def _source(self) -> str:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        if not isinstance(template, str):
            raise BadInput(
                f'model: the tokenizer in {self.folder} has no chat template: set template = "plain" in the [[dataset]]'
            )
        return template


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"model: {file} is not JSON: {error}") from error
    return config


def _content(token: Any) -> str:
    """A special token stands as text or as `{"content": text}`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _compile(source: str) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise BadInput(f"model: the chat template refuses this prompt: {message}")
