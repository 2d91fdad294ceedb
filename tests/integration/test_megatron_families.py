"""Model families in the Megatron learner against transformers: logits, gradient, export, and what is refused. Tiny
random models, one process, float32."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.helpers_megatron import (
    FAMILIES,
    LLAMA3,
    hf_model,
    learner_of,
    samples_of,
    straight_logprobs,
    straight_step,
    write_family,
)
from workers.runtime.errors import BadInput
from workers.trainer.learners.hf_config import read_config, rope_of
from workers.trainer.learners.megatron_model import row_of
from workers.trainer.packing import pack
from workers.transport.weights.manifest import RawTensor
from workers.transport.weights.store import read_tensors

pytestmark = pytest.mark.integration
TENSORS = "model.safetensors"
LONG = [(37 * place + place // 7) % 512 for place in range(300)]
"""Ids of a sequence; positions so far out that a wrong rotary angle shows."""


def as_torch(tensor: RawTensor) -> torch.Tensor:
    kind = {"BF16": torch.bfloat16, "F32": torch.float32}[tensor.dtype]
    return torch.frombuffer(bytearray(tensor.data), dtype=kind).reshape(tensor.shape)


@pytest.fixture(params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_family(tmp_path, request.param)
    return tmp_path


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids) - 1, V] by Megatron."""
    (micro,) = pack([ids[:1]], [len(ids) - 1], 4096)
    row = row_of(micro, [ids[:1]], [ids[1:]])
    found: torch.Tensor = learner_of(folder)._model(row.ids_S, row.positions_S, row.shape, row.predictors_T)
    return found.detach()


def test_every_family_has_the_logits_of_transformers_bit_for_bit(tiny: Path) -> None:
    expected = hf_model(tiny)(torch.tensor([LONG])).logits[0, :-1].detach()
    assert float(expected.abs().max()) > 1.0
    assert torch.equal(logits_of(tiny, LONG), expected)


def test_every_family_has_the_log_probs_of_transformers_packed_or_alone(tiny: Path) -> None:
    learner, model = learner_of(tiny), hf_model(tiny)
    samples = samples_of(0)
    packed = learner.logprobs(samples)
    for sample, together in zip(samples, packed, strict=True):
        straight = straight_logprobs(model, sample).detach().tolist()
        assert together == pytest.approx(straight, abs=1e-5)
        assert learner.logprobs([sample])[0] == pytest.approx(straight, abs=1e-5)


def test_every_family_exports_what_it_read_bit_for_bit(tiny: Path) -> None:
    read = {tensor.name: tensor for tensor in read_tensors(tiny)}
    for dtype, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        exported = list(learner_of(tiny, dtype=dtype).export())
        assert sorted(tensor.name for tensor in exported) == sorted(read)
        for tensor in exported:
            assert torch.equal(as_torch(tensor), as_torch(read[tensor.name]).to(kind)), tensor.name


def test_one_step_of_every_family_is_the_step_of_a_straight_loop(tiny: Path) -> None:
    learner, model = learner_of(tiny, micro_batch_tokens=40), hf_model(tiny)
    samples = samples_of(1)
    said = learner.train(samples)
    loss, norm = straight_step(model, samples, level="token", clip=(0.2, 0.28), learning_rate=1e-3)
    assert said["loss"] == pytest.approx(loss, abs=1e-6)
    assert said["grad_norm"] == pytest.approx(norm, rel=1e-5)
    straight = model.state_dict()
    differences = torch.cat([(as_torch(one) - straight[one.name]).abs().flatten() for one in learner.export()])
    # Adam's first step is lr x sign(gradient) almost everywhere: where a gradient is 0 but for rounding, it may turn.
    assert float((differences > 1e-6).float().mean()) < 1e-3
    assert float(differences.max()) <= 2.001e-3


def test_every_tensor_has_a_place_or_is_refused_by_its_name(tiny: Path) -> None:
    """Each tensor of the folder taken out, and one more that nobody knows."""
    whole = load_file(tiny / TENSORS)
    tied = json.loads((tiny / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in whole) is not tied
    for name in whole:
        save_file({other: tensor for other, tensor in whole.items() if other != name}, tiny / TENSORS)
        with pytest.raises(BadInput, match=f"no tensor {name} in"):
            learner_of(tiny)
    save_file(whole | {"model.layers.0.mlp.experts.weight": torch.ones(2)}, tiny / TENSORS)
    with pytest.raises(BadInput, match=r"tensor model\.layers\.0\.mlp\.experts\.weight has no place"):
        learner_of(tiny)


def test_the_rope_scaling_of_llama_3_changes_the_logits(tmp_path: Path) -> None:
    """So the comparison above sees it."""
    write_family(tmp_path / "scaled", "llama3-rope")
    plain = LLAMA3 | {"rope_type": "default", "factor": 1.0}
    write_family(tmp_path / "plain", "llama3-rope", rope_parameters={k: plain[k] for k in ("rope_type", "rope_theta")})
    difference = logits_of(tmp_path / "scaled", LONG) - logits_of(tmp_path / "plain", LONG)
    assert float(difference.abs().max()) > 1e-3


def test_rotary_frequencies_that_an_old_checkpoint_holds_are_computed_and_not_read(tmp_path: Path) -> None:
    write_family(tmp_path, "llama-tied")
    whole = load_file(tmp_path / TENSORS)
    save_file(whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}, tmp_path / TENSORS)
    assert sorted(tensor.name for tensor in learner_of(tmp_path).export()) == sorted(whole)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_family(folder, "llama-tied")
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' cannot be trained; known are llama, mistral, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads = 3 is no multiple of"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type 'yarn' cannot be trained; known are"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 2.0}}, r"rope_parameters: high_freq_factor is 2\.0; known"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "rope_type llama3 has no factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = true"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096: .* set it to null"),
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2"),
        ({"num_hidden_layers": 1}, "no place in the model"),
        ({"vocab_size": 513}, "makes"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(
    llama: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    for path in llama.iterdir():
        shutil.copy(path, tmp_path)
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput, match=said) as caught:
        learner_of(tmp_path)
    assert "model: " in str(caught.value)


def test_the_rope_of_older_and_newer_folders_is_read(llama: Path) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}}
    new = {"rope_parameters": LLAMA3}
    assert rope_of(old) == rope_of(new)
    assert rope_of(new) == {
        "position_embedding_type": "rope",
        "rotary_base": 5e5,
        "rope_scaling": True,
        "rope_scaling_factor": 32.0,
    }
    assert math.isclose(rope_of(read_config(llama))["rotary_base"], 10000.0)
