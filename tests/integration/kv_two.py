"""Two vLLM engines on a tiny model, each in a process of its own, and samples that move between them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from schemas.messages import KvHandle, RequestRecord, WeightsRecord
from schemas.settings import Engines, Settings
from tests.integration.helpers_vllm import Host, RemoteEngine, open_host, request, run_all, settings_for
from tests.integration.two_hosts import LOOPBACK, two_hosts
from workers.rollout.engines.base import Prefill
from workers.transport.kv import shared_memory
from workers.transport.kv.shared_memory import CLAIMED, OFFERED

VOCABULARY, BLOCK = 512, 32
BLOCK_BYTES = 2 * 2 * BLOCK * 32 * 4
"""Two layers; key and value of one head of 32, float32."""
PROMPT = tuple((7 * place + 3) % VOCABULARY for place in range(120))
NEW = 60
EMPTY = {"blocks": 0, "requests": 0, "moves": 0, "failed": 0}
Way = Literal["shared_memory", "flight", "two_hosts"]
WAYS = ["shared_memory", *(pytest.param(way, marks=pytest.mark.full) for way in ("flight", "two_hosts"))]
"""How KV travels: in shared memory, by Flight over the loopback, by Flight between two network namespaces."""


@dataclass
class Two:
    """Engines 0 and 1 serve version 0; there is a version 1 too. `folders`: where each has its KV; by Flight not the
    same one, as on two hosts."""

    hosts: tuple[Host, Host]
    engines: tuple[RemoteEngine, RemoteEngine]
    weights: list[WeightsRecord]
    model: Path
    folders: tuple[Path, Path]
    way: Way

    def files(self) -> list[Path]:
        """Of KV, anywhere."""
        return [path for folder in sorted(set(self.folders)) for path in sorted(folder.glob("*"))]


@dataclass
class Sample:
    """A sample on its way: what it has so far, and where its KV is."""

    request: RequestRecord
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    handle: KvHandle | None = None
    prefills: list[Prefill] = field(default_factory=list)
    finish: str | None = None

    def again(self) -> RequestRecord:
        """Its next issue."""
        so_far = {
            "response_ids": tuple(self.ids),
            "logprobs": tuple(self.logprobs),
            "loss_mask": (True,) * len(self.ids),
            "attempt": self.request.attempt + 1,
            "kv": self.handle,
        }
        self.request = self.request.model_copy(update=so_far)
        return self.request


def settings(model: Path, way: Way = "shared_memory") -> Settings:
    carrier: Literal["shared_memory", "flight"] = "shared_memory" if way == "shared_memory" else "flight"
    sizes = Engines(seats=8, kv_mib=4, kv_host_mib=1, tokens_per_request_max=512, kv_carrier=carrier)
    return settings_for(model, engines=sizes)


@contextmanager
def open_two(root: Path, way: Way = "shared_memory") -> Iterator[Two]:
    names = ("test", "test") if way == "shared_memory" else ("test-a", "test-b")
    folders = (shared_memory.folder_of(names[0], root), shared_memory.folder_of(names[1], root))
    with ExitStack() as stack:
        places = stack.enter_context(two_hosts()) if way == "two_hosts" else (LOOPBACK, LOOPBACK)
        hosts = (stack.enter_context(open_host(places[0])), stack.enter_context(open_host(places[1])))
        made = [hosts[0].call("publish_tiny", root, v, family="qwen2", tied=True, dtype="float32") for v in (0, 1)]
        model = made[0][1]
        first, second = (
            RemoteEngine(host, f"engine{n}", settings(model, way), model, kv_folder=folders[n], number=n)
            for n, host in enumerate(hosts)
        )
        yield Two(hosts, (first, second), [one[0] for one in made], model, folders, way)
        first.close()
        second.close()
    assert not any(folder.exists() for folder in folders), "shared memory is left behind"


@contextmanager
def emptied(two: Two) -> Iterator[None]:
    """Both serve version 0 with an empty prefix cache, and hold nothing afterwards."""
    for engine in two.engines:
        engine.load(two.weights[0])
    yield
    for number, host in enumerate(two.hosts):
        assert host.call("held", f"engine{number}") == EMPTY
    for engine in two.engines:
        engine.tend()
    left_behind = two.files()
    for path in left_behind:
        path.unlink()
    for engine in two.engines:
        engine.tend()  # an offer whose file is gone is over: samples of other tests have the same names
    assert [path.name for path in left_behind if path.name.endswith(CLAIMED)] == []


def decode(engine: RemoteEngine, samples: Sequence[Sample], tokens: int | None = None) -> None:
    """Until each has so many new tokens, or has ended."""
    by_key = {one.request.key: one for one in samples}
    goal = {one.request.key: len(one.ids) + tokens if tokens else 10_000 for one in samples}
    for _ in range(2_000):
        if all(one.finish or len(one.ids) >= goal[key] for key, one in by_key.items()):
            return
        for part in engine.step():
            one = by_key[part.key]
            one.ids += part.ids
            one.logprobs += part.logprobs
            one.finish = part.finish
            if part.prefill is not None:
                one.prefills.append(part.prefill)
    raise AssertionError("they did not get so far")


def stop(engine: RemoteEngine, samples: Sequence[Sample]) -> None:
    handles = engine.stop(tuple(one.request.key for one in samples), offer=True)
    for one in samples:
        one.handle = handles.get(one.request.key)


def go_on(engine: RemoteEngine, samples: Sequence[Sample]) -> None:
    for one in samples:
        engine.add(one.again())


def stayed(engine: RemoteEngine, requests: Sequence[RequestRecord]) -> list[tuple[list[int], list[float]]]:
    found = run_all(engine, requests)
    return [found[one.key] for one in requests]


def wanted(index: int = 0, *, temperature: float = 1.0, prompt: tuple[int, ...] = PROMPT, new: int = NEW) -> Sample:
    return Sample(request(prompt, version=0, index=index, temperature=temperature, max_new_tokens=new))


def left(two: Two, sample: Sample, tokens: int = 20) -> Sample:
    """It got so many tokens on engine 0 and was stopped there."""
    two.engines[0].add(sample.request)
    decode(two.engines[0], [sample], tokens)
    stop(two.engines[0], [sample])
    return sample


def ends_as_if_it_had_stayed(two: Two, sample: Sample, first: RequestRecord) -> Prefill:
    """It goes on on engine 1. What its second prefill took."""
    go_on(two.engines[1], [sample])
    decode(two.engines[1], [sample])
    (ids, logprobs) = stayed(two.engines[0], [first.model_copy(update={"attempt": 99})])[0]
    assert sample.ids == ids
    exact = 0.0 if sample.prefills[-1].carried else 1e-5
    assert max(abs(a - b) for a, b in zip(sample.logprobs, logprobs, strict=True)) <= exact
    return sample.prefills[-1]


def offered(two: Two, sample: Sample) -> Path:
    """By engine 0."""
    return two.folders[0] / (_name(sample) + OFFERED)


def claimed(two: Two, sample: Sample) -> Path:
    """By engine 1, where it has it."""
    start = "" if two.way == "shared_memory" else "1.from."
    return two.folders[1] / (start + _name(sample) + CLAIMED)


def _name(sample: Sample) -> str:
    assert sample.handle is not None
    return sample.handle.location.rpartition("/")[2]
