"""The broker for those with Docker is the one that runs start by themselves."""

import importlib.metadata
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipelines.local_services import BROKER_SETTINGS, KAFKA_VERSION
from schemas.topics import RECORD_BYTES_MAX

COMPOSE = Path(__file__).parents[2] / "infra" / "docker-compose.yml"
OF_THE_PLACE = {"PROCESS_ROLES", "NODE_ID", "CONTROLLER_QUORUM_VOTERS", "LISTENERS", "ADVERTISED_LISTENERS"} | {
    "CONTROLLER_LISTENER_NAMES",
    "INTER_BROKER_LISTENER_NAME",
    "LISTENER_SECURITY_PROTOCOL_MAP",
    "LOG_DIRS",
}


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def test_compose_says_the_same_broker_settings_as_the_embedded_broker() -> None:
    environment: dict[str, str] = services()["kafka"]["environment"]
    said = {name.removeprefix("KAFKA_"): value for name, value in environment.items() if name.startswith("KAFKA_")}
    shared = {name: value for name, value in said.items() if name not in OF_THE_PLACE}
    assert shared == {name.replace(".", "_").upper(): value for name, value in BROKER_SETTINGS.items()}


def test_compose_pins_the_versions_that_we_use() -> None:
    assert services()["kafka"]["image"] == f"apache/kafka:{KAFKA_VERSION}"
    assert services()["prefect"]["image"].startswith(f"prefecthq/prefect:{importlib.metadata.version('prefect')}-")


def test_compose_publishes_on_loopback_only_and_keeps_data_in_volumes() -> None:
    tree = yaml.safe_load(COMPOSE.read_text())
    for name, service in tree["services"].items():
        assert service["ports"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert [volume.split(":")[0] for volume in service["volumes"]] == [name]
        assert "healthcheck" in service, name
    assert set(tree["volumes"]) == set(tree["services"])


def test_the_broker_takes_the_largest_record() -> None:
    for name in ("message.max.bytes", "replica.fetch.max.bytes"):
        assert int(BROKER_SETTINGS[name]) >= RECORD_BYTES_MAX
