"""The broker for those with Docker is the one that runs start by themselves."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipelines.kafka_java import KAFKA_VERSION
from pipelines.local_services import BROKER_SETTINGS
from schemas.topics import RECORD_BYTES_MAX

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra" / "docker-compose.yml"
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
    """What only other services ask (postgres) is not published at all."""
    tree = yaml.safe_load(COMPOSE.read_text())
    kept: set[str] = set()
    for name, service in tree["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        kept |= {volume.split(":")[0] for volume in service.get("volumes", [])}
        assert "healthcheck" in service or "profiles" in service, name
    assert [name for name, service in tree["services"].items() if "ports" in service] == [
        "kafka",
        "kafka-ui",
        "prefect",
    ]
    assert kept == set(tree["volumes"])


SERVICE_KEYS = {
    "image": str,
    "build": dict,
    "command": list,
    "depends_on": dict,
    "environment": dict,
    "healthcheck": dict,
    "init": bool,
    "ports": list,
    "profiles": list,
    "restart": str,
    "stop_grace_period": str,
    "volumes": list,
}
"""Of the Compose specification, those that we use, in the one form that we write."""


def test_compose_has_the_form_of_the_specification() -> None:
    tree = yaml.safe_load(COMPOSE.read_text())
    assert set(tree) == {"name", "services", "volumes"}
    assert all(options is None for options in tree["volumes"].values())
    for name, service in tree["services"].items():
        assert set(service) <= set(SERVICE_KEYS), name
        for key, value in service.items():
            assert isinstance(value, SERVICE_KEYS[key]), f"{name}.{key}"
        assert ("image" in service) != ("build" in service), name
        assert all(isinstance(value, str) for value in service.get("environment", {}).values()), f"{name}: quote it"
        assert set(service.get("build", {})) <= {"context", "dockerfile_inline"}, name
        assert set(service.get("healthcheck", {})) <= {"test", "interval", "timeout", "retries", "start_period"}, name
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, name
            assert "healthcheck" in tree["services"][other], f"{name} waits for the health of {other}"


def test_the_image_of_a_run_copies_only_what_is_there_and_all_that_is_imported() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", services()["run"]["build"]["dockerfile_inline"], re.M)
    names = [name for names in copied for name in names.split()]
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert {"schemas", "workers", "pipelines", "configs", "requirements"} <= set(names)


def test_compose_starts_only_commands_that_there_are() -> None:
    """That of `run` is run whole in `tests/integration/test_compose.py`."""
    commands = {name: service["command"] for name, service in services().items() if "command" in service}
    assert set(commands) == {"prefect", "run"}
    assert commands["run"][0] == ".venv/bin/dora"
    for command in (["prefect", *commands["prefect"][1:]], ["pipelines.cli", *commands["run"][1:]]):
        argv = [sys.executable, "-m", *command, "--help"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def test_the_broker_takes_the_largest_record() -> None:
    for name in ("message.max.bytes", "replica.fetch.max.bytes"):
        assert int(BROKER_SETTINGS[name]) >= RECORD_BYTES_MAX
