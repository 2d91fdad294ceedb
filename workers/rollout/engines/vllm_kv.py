"""The KV of requests that leave and come, for a vLLM engine: offers, claims, and what came of each.

    stop  -> how many tokens have KV -> is there room? -> written and OFFERED -> a handle for the partial
    add   -> CLAIMED -> is it good? -> vLLM's connector loads it in the first step -> first token ... RELEASED

Rule 1: KV is copied out before its request is stopped, so no block of it can be another request's by then.
Rule 2: whatever is wrong, the request goes on from its ids alone; `Prefill.reason` says why.
Rule 3: what can wait for the first token waits for it: giving a file's memory back takes as long as reading it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.messages import KvHandle, RequestRecord
from schemas.settings import Settings
from workers.rollout.engines.base import Prefill
from workers.runtime import clock
from workers.transport.kv import handoff
from workers.transport.kv.flight import Flight
from workers.transport.kv.shared_memory import SharedMemory, read_header


@dataclass(frozen=True, slots=True)
class Entrance:
    """How a request came in: the handle it had, the claimed file if its KV is good, else the reason."""

    ids: int
    handle: KvHandle | None
    path: Path | None
    tokens: int
    reason: str

    def parameters(self, *, drawn: int) -> dict[str, Any]:
        """What vLLM is given for its connector. `drawn`: tokens that were sampled for the request so far."""
        return {"kv_transfer_params": {"drawn": drawn, "path": str(self.path or ""), "tokens": self.tokens}}


class KvMoves:
    """Of one engine. `llm` is its LLMEngine in this process."""

    def __init__(  # noqa: PLR0917
        self, settings: Settings, model_folder: Path, llm: Any, folder: Path | None, number: int, address: str
    ) -> None:
        core = llm.engine_core.engine_core
        self._llm, self._scheduler = llm, core.scheduler
        self._block_tokens: int = core.vllm_config.cache_config.block_size
        self._bytes_max = settings.engines.kv_host_mib << 20
        self._offers = handoff.Offers(self._bytes_max)
        self._kind: handoff.Kind | None = None
        self._block_bytes = 0
        self._inside: dict[str, Entrance] = {}
        self._memory: SharedMemory | None = None
        self._loaded: list[Path] = []
        """Files to be released."""
        one_part = core.vllm_config.parallel_config.world_size == 1
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        (form, *_) = llm.collective_rpc("begin_handover", args=(self._scheduler.kv_cache_config.num_blocks,))
        if folder is not None and settings.engines.kv_host_mib and one_part and len(groups) == 1 and form is not None:
            layout, dtype, self._block_bytes = form
            now, flies = clock.now_us(), settings.engines.kv_carrier == "flight"
            self._memory = Flight(folder, number, now, address) if flies else SharedMemory(folder, number, now)
            self._kind = handoff.Kind(
                model=_model(settings, model_folder),
                fingerprint="",
                layout=layout,
                dtype=dtype,
                block_tokens=self._block_tokens,
            )

    def serves(self, fingerprint: str) -> None:
        """KV is of these weights from here on."""
        if self._kind is not None:
            self._kind = self._kind.model_copy(update={"fingerprint": fingerprint})

    # --- coming ---------------------------------------------------------------------------------

    def enter(self, name: str, request: RequestRecord, ids: Sequence[int]) -> Entrance:
        """Claim the KV that comes with the request, if it is good; `ids` are its prompt and response so far."""
        path, tokens, reason, handle = None, 0, "", request.kv
        if request.response_ids and (handle is None or handle.refused):
            reason = "no_handle" if handle is None else handle.refused
        elif request.response_ids and handle is not None:
            try:
                path, tokens = self._claim(handle, ids)
            except handoff.Unusable as error:
                reason = error.reason
        self._inside[name] = Entrance(len(ids), handle, path, tokens, reason)
        return self._inside[name]

    def _claim(self, handle: KvHandle, ids: Sequence[int]) -> tuple[Path, int]:
        if self._memory is None or self._kind is None:
            raise handoff.Unusable("unsupported")
        path = self._memory.claim(handle.location, self._bytes_max - self._offers.held)
        try:
            header = read_header(path)
            if reason := handoff.refusal(header, self._kind, ids):
                raise handoff.Unusable(reason)
            if header.size != self._blocks(header.tokens) * self._block_bytes:
                raise handoff.Unusable("layout")
        except handoff.Unusable:
            self._memory.release(path)
            raise
        return path, header.tokens

    def settle(self, name: str, internal: str, cached: int) -> Prefill:
        """It has its first token: what that took. `cached`: tokens that vLLM says it had not to compute."""
        one, connector = self._inside.pop(name), self._scheduler.connector
        loaded = connector.loaded.pop(internal, 0)
        failed = internal in connector.failed
        connector.failed.discard(internal)
        if one.path is not None:
            self._loaded.append(one.path)
        if failed:
            return Prefill(computed=one.ids - cached + loaded, reason="load_failed")
        if one.path is None:
            return Prefill(computed=one.ids - cached, reason=one.reason)
        return Prefill(computed=one.ids - cached, carried=cached, size=self._blocks(loaded) * self._block_bytes)

    # --- leaving --------------------------------------------------------------------------------

    def leave(self, name: str, internal: str, request_name: tuple[int, int, int], *, offer: bool) -> KvHandle | None:
        """Before the request is stopped: offer what it has. None if it has nothing, or nobody wants it."""
        entrance = self._inside.pop(name, None)
        self._scheduler.connector.loaded.pop(internal, None)
        self._scheduler.connector.failed.discard(internal)
        if entrance is not None and entrance.path is not None and self._memory is not None:
            if offer:  # not even begun: what it came with is as good as it was
                self._memory.hand_on(entrance.path)
                return entrance.handle
            self._memory.release(entrance.path)
        request = self._scheduler.requests.get(internal)
        if not offer or request is None:
            return None
        tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        if tokens <= 0:
            return None
        return self._offer(request_name, internal, list(request.all_token_ids[:tokens]))

    def _offer(self, request_name: tuple[int, int, int], internal: str, ids: list[int]) -> KvHandle:
        if self._memory is None or self._kind is None:
            return _refused("unsupported", self._kind)
        name, size = self._memory.name(*request_name), self._blocks(len(ids)) * self._block_bytes
        for effect in self._offers.on(handoff.Offer(name, len(ids), size, clock.now_us())):
            match effect:
                case handoff.Expire():
                    self._memory.delete(effect.name)
                case handoff.Refuse():
                    return _refused(effect.reason, self._kind)
                case _:
                    pass
        blocks = list(self._scheduler.kv_cache_manager.get_block_ids(internal)[0][: self._blocks(len(ids))])
        header = handoff.Header(kind=self._kind, tokens=len(ids), prefix=handoff.prefix_hash(ids), size=size)
        written = (str(self._memory.path(name)), blocks, header.model_dump_json())
        (failed, *_) = self._llm.collective_rpc("export_kv", args=written)
        if failed:
            self._offers.on(handoff.Seen(name, handoff.State.RELEASED, clock.now_us()))
            return _refused(failed, self._kind)
        return KvHandle(location=self._memory.location(name), tokens=len(ids), fingerprint=self._kind.fingerprint)

    # --- keeping --------------------------------------------------------------------------------

    def tend(self) -> None:
        """Release what was loaded, see what others have; renew, expire, and clear away what the dead have left."""
        if self._memory is None:
            return
        self.release_loaded()
        now = clock.now_us()
        for name in self._offers.names:
            state = self._memory.state(name)
            if state is not handoff.State.OFFERED:
                self._offers.on(handoff.Seen(name, state, now))
        for effect in self._offers.on(handoff.Tick(now)):
            match effect:
                case handoff.Expire():
                    self._memory.delete(effect.name)
                case handoff.Renew():
                    self._memory.renew(effect.name, now)
                case _:
                    raise AssertionError(f"{effect} on a tick")
        self._memory.sweep(now)

    def close(self) -> None:
        if self._memory is not None:
            self.release_loaded()
            self._memory.close()

    def release_loaded(self) -> None:
        """Give up the files of requests that have their first token."""
        for path in self._loaded:
            assert self._memory is not None, "a file without a carrier"
            self._memory.release(path)
        self._loaded.clear()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)


def _refused(reason: str, kind: handoff.Kind | None) -> KvHandle:
    return KvHandle(location="", tokens=0, fingerprint="" if kind is None else kind.fingerprint, refused=reason)


def _model(settings: Settings, folder: Path) -> str:
    """Of the model's configuration and of what vLLM is told besides."""
    told = (folder / "config.json").read_bytes() + repr(sorted(settings.vllm.items())).encode()
    return hashlib.blake2b(told, digest_size=16).hexdigest()
