"""vLLM's side of a hand-over: a KV connector that loads the blocks of a moved request before its first step.

    scheduler: how many tokens come with it -> which blocks were allocated for them -> `_Work` of this step
    worker:    before the forward pass, copy these blocks from the file; before sampling, fast-forward its generator

Rule 1: a load ends at the last token but one: exactly one token is computed. Blocks that the prefix cache has already
(the prompt of a sibling) are not loaded.
Rule 2: a load that fails is said to vLLM, which computes those blocks again; nothing is raised, and nothing is wrong.
Rule 3: on a CPU vLLM draws one number for each sampled token from a generator that starts at the request's seed. A
request that goes on with `drawn` tokens draws as many first, so it goes on as if it had never moved.
Rule 4: the worker side keeps nothing but the step's failures: vLLM has one connector for all engines of a process.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from workers.transport.kv import shared_memory

NAME = "HandoverConnector"
MODULE = __name__
SEED_RANGE = 2**31
_RUNNERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Model runners of this process, by the identity of their layers' table."""


def configuration() -> dict[str, Any]:
    """What `EngineArgs(kv_transfer_config=...)` is given."""
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def remember(runner: Any) -> None:
    """The connector will find the runner's requests by its layers."""
    _RUNNERS[id(runner.compilation_config.static_forward_context)] = runner


def caches(layers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Each layer's blocks [blocks, ...] by name, in order of names; a tensor that layers share comes once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name in sorted(layers):
        cache = getattr(layers[name], "kv_cache", None)
        if isinstance(cache, torch.Tensor) and cache.numel() and cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            found[name] = cache
    return found


def layout(layers: Mapping[str, Any], caches_: Mapping[str, torch.Tensor]) -> str:
    """Hash of all that orders the bytes of a block: vLLM, device, attention backend and its instruction set, layers."""
    said = [__version__]
    for name, cache in caches_.items():
        backend = (type(getattr(layers[name], "impl", None)).__name__, getattr(layers[name], "isa", ""))
        said.append(f"{name} {cache.device.type} {backend} {tuple(cache.shape[1:])} {cache.dtype}")
    return hashlib.blake2b("\n".join(said).encode(), digest_size=16).hexdigest()


def export(caches_: Mapping[str, torch.Tensor], blocks: Sequence[int]) -> Iterator[list[memoryview]]:
    """The bytes of these blocks, one layer after the other."""
    for cache in caches_.values():
        if cache.device.type == "cpu":
            yield _rows(cache, blocks)
        else:
            index = torch.tensor(blocks, dtype=torch.long, device=cache.device)
            yield _rows(cache.index_select(0, index).cpu(), range(len(blocks)))


def load(caches_: Mapping[str, torch.Tensor], blocks: Sequence[int], skip: int, of: int, path: Path) -> None:
    """Copy the blocks from the `skip`-th on, of `of` in the file, into these. OSError, ValueError, RuntimeError."""
    start = 0
    for cache in caches_.values():
        size = cache[0].nbytes
        if cache.device.type == "cpu":
            shared_memory.read(path, start + skip * size, _rows(cache, blocks))
        else:
            host = torch.empty(len(blocks), *cache.shape[1:], dtype=cache.dtype)
            shared_memory.read(path, start + skip * size, _rows(host, range(len(blocks))))
            index = torch.tensor(blocks, dtype=torch.long, device=cache.device)
            cache.index_copy_(0, index, host.to(cache.device))
        start += of * size


def _rows(tensor: torch.Tensor, rows: Iterable[int]) -> list[memoryview]:
    """The bytes of these rows of a contiguous tensor on the host, not copied."""
    whole, size = memoryview(tensor.view(torch.uint8).numpy()).cast("B"), tensor[0].nbytes
    return [whole[row * size : (row + 1) * size] for row in rows]


@dataclass(frozen=True, slots=True)
class _Load:
    """Blocks `skip` .. `skip + len(blocks)` of the `of` in the file go into `blocks`."""

    request: str
    path: str
    blocks: tuple[int, ...]
    skip: int
    of: int


@dataclass
class _Work(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step. `drawn`: numbers to draw first, by request."""

    loads: list[_Load] = field(default_factory=list)
    drawn: dict[str, int] = field(default_factory=dict)


class HandoverConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Made by vLLM, once for the scheduler and once for the worker.

    A request's `kv_transfer_params`: `drawn`, numbers drawn for it so far; `path`, the claimed file with the KV of its
    first `tokens` tokens, or nothing.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._work = _Work()
        self._begun: set[str] = set()
        self._loading: dict[str, tuple[int, ...]] = {}
        self.loaded: dict[str, int] = {}
        """Tokens that were loaded, by request; the engine takes them out."""
        self.failed: set[str] = set()
        self._bad: set[int] = set()

    # --- scheduler ------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens come with the request beyond those that the prefix cache has."""
        own = request.kv_transfer_params or {}
        if not own.get("path") or request.request_id in self._begun:
            return 0, False
        return max(0, min(own["tokens"], request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is in the next step, with these blocks."""
        own, name = request.kv_transfer_params, request.request_id
        if not own or name in self._begun:
            return
        self._begun.add(name)
        if own["drawn"]:
            self._work.drawn[name] = own["drawn"]
        if num_external_tokens > 0:
            tokens = min(own["tokens"], request.num_tokens - 1)
            size, (ids, *_) = self._block_tokens, blocks.get_block_ids()
            skip = (tokens - num_external_tokens) // size
            wanted = tuple(ids[skip : -(-tokens // size)])
            self._work.loads.append(_Load(name, own["path"], wanted, skip, -(-own["tokens"] // size)))
            self._loading[name] = wanted
            self.loaded[name] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> _Work:  # noqa: ARG002
        work, self._work = self._work, _Work()
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker said of the step."""
        bad = connector_output.invalid_block_ids or set()
        self.failed |= {name for name, blocks in self._loading.items() if not bad.isdisjoint(blocks)}
        self._loading.clear()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """It ended or was stopped: its blocks may go at once. What others shall have of it was copied before."""
        self._begun.discard(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    # --- worker ---------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        work: _Work = self._get_connector_metadata()
        layers = forward_context.no_compile_layers
        if work.loads:
            tensors = caches(layers)
            for one in work.loads:
                try:
                    load(tensors, one.blocks, one.skip, one.of, Path(one.path))
                except (OSError, ValueError, RuntimeError):
                    self._bad.update(one.blocks)
                    # This step's token is thrown away, and the number that was drawn for it with it.
                    work.drawn[one.request] = work.drawn.get(one.request, 1) - 1
        if work.drawn:
            fast_forward(_RUNNERS.get(id(layers)), work.drawn)
        work.loads, work.drawn = [], {}

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def fast_forward(runner: Any, drawn: Mapping[str, int]) -> None:
    """Draw so many numbers for each request. A runner without generators keys its noise by position and needs none."""
    requests = getattr(runner, "requests", None)
    if requests is None:
        return
    for name, count in drawn.items():
        generator = requests[name].generator
        if generator is not None and count:
            torch.randint(0, SEED_RANGE, (count,), generator=generator, dtype=torch.long)
