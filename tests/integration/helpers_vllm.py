"""vLLM engines for tests, in a process of their own: vLLM changes the environment and torch, so it never shares a
process with pytest or with Megatron. A `Host` is that process; `RemoteEngine` is an engine in it, as an Engine.
"""

import gc
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from schemas.ids import RequestKey, sampling_seed
from schemas.messages import KvHandle, RequestRecord, WeightsRecord
from schemas.settings import Dataset, Engines, Sampling, Settings
from tests.integration.two_hosts import LOOPBACK, Place
from workers.rollout.engines.base import Engine, Load, Tokens
from workers.transport.weights.store import Published

ANSWER_S_MAX = 240.0
Answer = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Prompt ids, response ids, log-probs."""


def settings_for(model_folder: Path, *, dtype: str = "float32", seats: int = 8, **changes: Any) -> Settings:
    """Settings of an engine on a tiny model. `changes` replace whole sections."""
    sections: dict[str, Any] = {
        "model": str(model_folder),
        "dtype": dtype,
        "steps": 1,
        "group_size": 2,
        "engines": Engines(seats=seats, kv_mib=16, tokens_per_request_max=512),
        "dataset": (Dataset(path="none.jsonl"),),
    }
    return Settings.model_validate(sections | changes)


def request(
    prompt_ids: Sequence[int],
    *,
    version: int,
    group: int = 0,
    index: int = 0,
    attempt: int = 0,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    seed: int | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    **changes: Any,
) -> RequestRecord:
    return RequestRecord(
        run="test",
        group=group,
        index=index,
        attempt=attempt,
        version=version,
        engine=0,
        incarnation=1,
        sequence=0,
        purpose="train",
        task="task",
        prompt_row=0,
        prompt_ids=tuple(prompt_ids),
        answer="",
        seed=sampling_seed(0, group, index) if seed is None else seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        queued_at=0,
        **changes,
    )


def run_all(engine: Engine, requests: Sequence[RequestRecord]) -> dict[RequestKey, tuple[list[int], list[float]]]:
    """Ids and log-probs of the new tokens of each request, all in one batch."""
    found: dict[RequestKey, tuple[list[int], list[float]]] = {one.key: ([], []) for one in requests}
    for one in requests:
        engine.add(one)
    open_keys = set(found)
    for _ in range(10_000):
        for part in engine.step():
            found[part.key][0].extend(part.ids)
            found[part.key][1].extend(part.logprobs)
            if part.finish:
                open_keys.discard(part.key)
        if not open_keys:
            return found
    raise AssertionError(f"{len(open_keys)} requests never ended")


class Host:
    """The process. It ends with `close`, or with its parent."""

    def __init__(self, place: Place = LOOPBACK) -> None:
        self.place = place
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, place), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: str, *args: Any, **named: Any) -> Any:
        """Run a function of this module over there; what it raises is raised here."""
        self._pipe.send((function, args, named))
        assert self._pipe.poll(ANSWER_S_MAX), f"{function} gave no answer in {ANSWER_S_MAX} s"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def open_host(place: Place = LOOPBACK) -> Iterator[Host]:
    host = Host(place)
    try:
        yield host
    finally:
        host.close()


class RemoteEngine:
    """An engine of the host."""

    def __init__(
        self, host: Host, name: str, settings: Settings, model_folder: Path, *, cold: int | None = None, **kv: Any
    ) -> None:
        self._host, self._name = host, name
        self.seats, self.kv_tokens_max, self.tokens_per_request_max = host.call(
            "start", name, settings, model_folder, cold, address=host.place.address, **kv
        )

    def _do(self, method: str, *args: Any, **named: Any) -> Any:
        return self._host.call("do", self._name, method, *args, **named)

    @property
    def version(self) -> int | None:
        found: int | None = self._host.call("get", self._name, "version")
        return found

    @property
    def fingerprint(self) -> str:
        return str(self._host.call("get", self._name, "fingerprint"))

    def prepare(self, weights: WeightsRecord) -> bool:
        return bool(self._do("prepare", weights))

    def load(self, weights: WeightsRecord) -> None:
        self._do("load", weights)

    def add(self, request: RequestRecord) -> None:
        self._do("add", request)

    def step(self) -> list[Tokens]:
        found: list[Tokens] = self._do("step")
        return found

    def stop(self, keys: tuple[RequestKey, ...], *, offer: bool = False) -> dict[RequestKey, KvHandle]:
        found: dict[RequestKey, KvHandle] = self._do("stop", keys, offer=offer)
        return found

    def tend(self) -> None:
        self._do("tend")

    def load_now(self) -> Load:
        found: Load = self._do("load_now")
        return found

    def close(self) -> None:
        self._host.call("close", self._name)


def sample(  # noqa: PLR0917
    model_folder: Path,
    prompts: Sequence[Sequence[int]],
    n: int,
    temperature: float,
    dtype: str,
    max_new_tokens: int,
    *,
    host: Host | None = None,
) -> list[Answer]:
    """`n` samples of each prompt from vLLM on a Hugging Face folder, as loaded by vLLM itself. Prompt by prompt."""
    if host is None:
        with open_host() as own:
            return sample(model_folder, prompts, n, temperature, dtype, max_new_tokens, host=own)
    requests = [
        request(ids, version=0, group=group, index=index, temperature=temperature, max_new_tokens=max_new_tokens)
        for group, ids in enumerate(prompts)
        for index in range(n)
    ]
    longest = max(len(ids) for ids in prompts) + max_new_tokens
    settings = settings_for(
        model_folder,
        dtype=dtype,
        sampling=Sampling(temperature=temperature),
        engines=Engines(seats=16, kv_mib=128, tokens_per_request_max=max(16, longest)),
    )
    engine = RemoteEngine(host, "sample", settings, model_folder, cold=0)
    found = run_all(engine, requests)
    engine.close()
    return [(one.prompt_ids, tuple(found[one.key][0]), tuple(found[one.key][1])) for one in requests]


# --- over there -------------------------------------------------------------------------------

_ENGINES: dict[str, Any] = {}
_CLOSED: list[Any] = []
_KEPT: dict[str, Any] = {}


def _serve(pipe: Connection, place: Place) -> None:
    place.enter()
    while True:
        try:
            function, args, named = pipe.recv()
        except EOFError:
            return
        try:
            answer = globals()[function](*args, **named)
        except (Exception, SystemExit) as error:  # handed to the caller, who raises it
            answer = error
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            return


def start(name: str, settings: Settings, model_folder: Path, cold: int | None, **kv: Any) -> tuple[int, int, int]:
    """`cold`: let vLLM load the folder itself, as this version, with no swap ever. `kv`: as of the engine."""
    from workers.rollout.engines.vllm_engine import VllmEngine

    if cold is not None:
        settings = settings.model_copy(update={"vllm": settings.vllm | {"load_format": "auto"}})
    engine = VllmEngine(settings, model_folder, **kv)
    if cold is not None:
        engine._version = cold
    _ENGINES[name] = engine
    return engine.seats, engine.kv_tokens_max, engine.tokens_per_request_max


def do(name: str, method: str, *args: Any, **named: Any) -> Any:
    return getattr(_ENGINES[name], method)(*args, **named)


def get(name: str, attribute: str) -> Any:
    return getattr(_ENGINES[name], attribute)


def close(name: str) -> None:
    """vLLM's shutdown takes the process groups that all engines of the process share: so all go with the last one."""
    _CLOSED.append(_ENGINES.pop(name))
    if not _ENGINES:
        for engine in _CLOSED:
            engine.close()
        _CLOSED.clear()
        gc.collect()


def without_repacking(on: bool) -> None:
    """Leave the packed copies of output layers as they are, or no longer."""
    from workers.rollout.engines import vllm_spare

    kept = _KEPT.setdefault("packing", vllm_spare.made_by_packing)

    stale = lambda layer, twin: {} if type(layer).__name__ == "ParallelLMHead" else kept(layer, twin)  # noqa: E731
    setattr(vllm_spare, "made_by_packing", stale if on else kept)  # noqa: B010


def reload_by_vllm(name: str, folder: Path) -> None:
    """vLLM's own reload of a folder's tensors."""
    from workers.rollout.engines import vllm_spare

    _ENGINES[name].reload(list(vllm_spare.tensors_of(folder, vllm_spare.Fingerprint())))


def serve_anyway(name: str, version: int) -> None:
    """Take what was loaded last for `version`, whatever the probe said."""
    _ENGINES[name]._version = version


def publish_tiny(root: Path, version: int, *, family: Any, tied: bool, dtype: Any) -> tuple[WeightsRecord, Path]:
    """A random model, another one for each version, as published; its probe comes from transformers, not from vLLM."""
    from pipelines.models import write_tiny

    source = root / f"model-{version}"
    write_tiny(source, family, tied=tied, seed=100 + version, dtype=dtype)
    return publish_folder(root, version, source, dtype)


def publish_folder(
    root: Path, version: int, source: Path, dtype: Any, *, probe_shift: float = 0.0
) -> tuple[WeightsRecord, Path]:
    """A Hugging Face folder as a published version. `probe_shift` is added to its probe."""
    from workers.transport.weights.manifest import probe_ids
    from workers.transport.weights.store import Store, read_tensors

    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    probe = [one + probe_shift for one in hf_logprobs(source, dtype, probe_ids(vocabulary), 1.0)]
    made = Store(root / "weights").publish(
        version, read_tensors(source), model_folder=source, probe_logprobs=probe, dtype=dtype
    )
    return announcement(version, made), Path(made.location.removeprefix("file://"))


def announcement(version: int, made: Published) -> WeightsRecord:
    """What the trainer would say of a published version."""
    return WeightsRecord(
        run="test",
        version=version,
        step=version - 1 if version else None,
        groups=(),
        trajectories=0,
        location=made.location,
        manifest_sha256=made.manifest_sha256,
        fingerprint=made.fingerprint,
        created_at=0,
    )


def hf_logprobs(folder: Path, dtype: str, ids: Sequence[int], temperature: float) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1].float() / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [float(one) for one in chosen.tolist()]


def probe(name: str, ids: Sequence[int]) -> list[float]:
    """The engine's own probe of what it serves."""
    engine = _ENGINES[name]
    return list(engine.probe(ids, engine.version or 0))


def break_loads(on: bool) -> None:
    """Let every copy of KV into an engine of this process fail, or no longer."""
    from workers.transport.kv import vllm_connector

    def fails(*_: Any) -> None:
        raise RuntimeError("this copy fails")

    kept = _KEPT.setdefault("load", vllm_connector.load)
    setattr(vllm_connector, "load", fails if on else kept)  # noqa: B010


def tend_later(name: str, seconds: float) -> None:
    """`tend` of the engine as it would be so much later."""
    from workers.rollout.engines import vllm_kv

    class Later:
        now_us = staticmethod(lambda: _KEPT["now_us"]() + int(seconds * 1_000_000))

    _KEPT.setdefault("now_us", vllm_kv.clock.now_us)
    kept, vllm_kv.clock = vllm_kv.clock, Later  # type: ignore[assignment]
    try:
        _ENGINES[name].tend()
    finally:
        vllm_kv.clock = kept


def held(name: str) -> dict[str, int]:
    """What an engine that is empty must not hold: blocks, requests in vLLM's tables, files and names of its moves."""
    engine = _ENGINES[name]
    scheduler, moves = engine._core.scheduler, engine._moves
    return {
        "blocks": engine._blocks_free_max - engine._pool.get_num_free_blocks(),
        "requests": len(scheduler.requests) + len(engine._requests) + len(engine._internal) + len(engine._new),
        "moves": len(moves._inside) + len(scheduler.connector._begun) + len(scheduler.connector.loaded),
        "failed": len(scheduler.connector.failed) + len(scheduler.connector._loading),
    }


def resident_mib() -> float:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
