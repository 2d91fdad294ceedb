"""The artifacts of a flow run: one of each kind, made once and then updated in place."""

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId


class Artifacts:
    """Those of one flow run. A process that goes on with it (Resume, Retry) updates what the first one made."""

    def __init__(self, flow_run: UUID) -> None:
        self._flow_run = flow_run
        self._made: dict[str, UUID] = {}

    def put(self, client: SyncPrefectClient, kind: str, name: str, data: Any, text: str = "") -> None:
        """`kind` is Prefect's (progress, table, markdown); `name` becomes its key, `text` says what it is."""
        if not self._made:
            mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run]))
            self._made = {str(found.type): found.id for found in client.read_artifacts(artifact_filter=mine)}
        if kind in self._made:
            client.update_artifact(self._made[kind], ArtifactUpdate(data=data))
            return
        key = "".join(c if c.isalnum() else "-" for c in name.lower())
        create = ArtifactCreate(key=key, type=kind, data=data, description=text or None, flow_run_id=self._flow_run)
        self._made[kind] = client.create_artifact(create).id
