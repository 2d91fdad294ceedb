"""The engine that a run's settings name, as its rollout workers and whoever samples again make it."""

from pathlib import Path

from schemas.settings import Settings
from workers.rollout.engines.base import Engine


def engine_of(
    settings: Settings, *, kv_folder: Path | None = None, number: int = 0, address: str = "127.0.0.1"
) -> Engine:
    """It serves nothing yet. `kv_folder`: for the KV of requests that move; None = they are prefilled again. `address`:
    of this host, for engines of others. BadInput if the model or the settings cannot be served."""
    if settings.engines.kind == "vllm":
        from workers.rollout.engines.vllm_engine import VllmEngine

        return VllmEngine(settings, Path(settings.model), kv_folder=kv_folder, number=number, address=address)
    from workers.rollout.engines.paced_engine import PacedEngine

    return PacedEngine(settings)
