"""Prefect's deployments `train`, `evaluate`, `export`, the worker that runs them, and what commands ask of the server.

Rule 1: a pool and its deployments belong to one checkout on one machine (the place): a worker takes no run of another.
Rule 2: a run is started by `pipelines.flow_process`, in the folder of the checkout.
"""

import asyncio
import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow
from prefect.states import Cancelled
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from pipelines import config_file, flows, reporter
from pipelines.home import LAUNCH_VARIABLE
from schemas.settings import Settings

QUICKSTART = Path("configs/quickstart.toml")
AWAY = reporter.AWAY
"""What a call here may raise when the server does not answer."""


def register(place: str) -> None:
    """Make or renew the pool and the deployments of `place`."""
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=_pool(place), type="process", base_job_template=template))
        form: dict[str, Any] = {}
        if QUICKSTART.is_file():
            form["config"] = config_file.read_settings(QUICKSTART).model_dump(mode="json")
        _deploy(client, place, flows.train, form, "Train: a run, as by `dora run`. The form starts as the quickstart.")
        text = "Beside a run until it ends: tables of its samples, and its held-out rows sampled on versions."
        _deploy(client, place, flows.evaluate, {}, text)
        _deploy(client, place, flows.export, {}, "Write a version of a run as a Hugging Face folder.")


def _deploy(client: SyncPrefectClient, place: str, flow: Flow[..., Any], form: dict[str, Any], text: str) -> None:
    command = [sys.executable, "-m", "pipelines.flow_process"]
    client.create_deployment(
        flow_id=client.create_flow_from_name(flow.name),
        name=place,
        description=text,
        work_pool_name=_pool(place),
        entrypoint=f"{flow.fn.__module__}.{flow.fn.__name__}",
        parameters=form,
        parameter_openapi_schema=parameter_schema(flow).model_dump(mode="json"),
        enforce_parameter_schema=True,
        job_variables={"command": shlex.join(command), "working_dir": str(Path.cwd())},
    )


def _pool(place: str) -> str:
    return f"dora-{place}"


# --- asked by a command -----------------------------------------------------------------------


def create_run(place: str, settings: Settings, resume: bool, launch: str) -> UUID:
    """A flow run of `train`, which the worker takes within seconds. AWAY."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"train/{place}")
        run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"config": settings.model_dump(mode="json"), "resume": resume},
            name=settings.name or None,
            job_variables={"env": {LAUNCH_VARIABLE: launch}},
        )
        return run.id


def resume_suspended(flow_run: UUID, settings: Settings) -> bool:
    """Go on with this very flow run, if it is suspended and was asked for the same. AWAY."""
    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(flow_run)
        except ObjectNotFound:
            return False
        if run.state is None or not run.state.is_paused():
            return False
        if run.parameters.get("config", {}) | {"name": settings.name} != settings.model_dump(mode="json"):
            client.set_flow_run_state(flow_run, Cancelled(message="it went on as another flow run"), force=True)
            return False
        answer = client.resume_flow_run(flow_run)
        return answer.state is not None and answer.state.type == StateType.SCHEDULED


def state_of(flow_run: UUID) -> tuple[str, str, bool]:
    """Its name, message, and whether it is final. AWAY."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
    return ("", "", False) if state is None else (state.name or "", state.message or "", state.is_final())


def withdraw(flow_run: UUID, reason: str) -> None:
    """Of a flow run that no process has begun. AWAY."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, Cancelled(message=reason), force=True)


# --- the worker -------------------------------------------------------------------------------


async def _work(place: str, ready: Path) -> None:
    worker = ProcessWorker(work_pool_name=_pool(place), name=place)
    await worker.start(printer=lambda *_: ready.touch())


def main(place: str, ready: Path) -> None:
    """Until a signal ends it; runs that it started do not end with it."""
    register(place)
    asyncio.run(_work(place, ready))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
