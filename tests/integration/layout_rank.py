"""One of the processes of `layouts.Room`: a rank of one world after the other, each as a line on stdin says.

It is given rank, settings, model folder, the file where the ranks meet, and calls. It makes the learner and the calls,
and says what each gave, in a line on stdout.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is no answer
    import torch.distributed as dist

    from schemas.settings import Settings
    from workers.trainer.learners.layout import layout_of
    from workers.trainer.learners.megatron_learner import MegatronLearner
    from workers.trainer.learners.megatron_world import Place

    for line in sys.stdin:
        told = json.loads(line)
        settings = Settings.model_validate(told["settings"])
        ranks = layout_of(settings).ranks
        place = Place(told["rank"], dist.FileStore(told["meet"], ranks)) if ranks > 1 else None
        learner = MegatronLearner(settings, Path(told["model"]), place)
        said = [make(learner, call, arguments) for call, arguments in told["calls"]]
        answers.write(json.dumps(said).encode() + b"\n")
        answers.flush()


def make(learner: Any, call: str, arguments: Any) -> Any:
    """What a call gives, as JSON has it. `export` writes a safetensors file too."""
    import torch
    from safetensors.torch import save_file

    from tests.integration.helpers_megatron import samples_from, save
    from workers.transport.weights.manifest import fingerprint

    match call:
        case "train":
            return learner.train(samples_from(arguments[0]), arguments[1])
        case "logprobs":
            return learner.logprobs(samples_from(arguments))
        case "probe":
            return learner.probe(arguments)
        case "save":
            return save(learner, Path(arguments))
        case "restore":
            return learner.restore(Path(arguments))
        case "export":
            raw = list(learner.export())
            kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
            if raw:
                save_file(
                    {t.name: torch.frombuffer(bytearray(t.data), dtype=kinds[t.dtype]).reshape(t.shape) for t in raw},
                    arguments,
                )
            return fingerprint(raw) if raw else None
        case "bytes":
            return sum(one.numel() * one.element_size() for one in learner._model.parameters())
    raise AssertionError(call)


if __name__ == "__main__":
    main()
