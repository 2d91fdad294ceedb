"""Runs that a real broker's state refuses: topics of another run with the same name."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.config_file import read_resolved, write_resolved
from pipelines.runs import RESOLVED
from schemas.topics import Topics
from tests.unit.pipeline_parts import a_config, some_settings
from workers.transport.records.kafka_bus import open_bus

pytestmark = pytest.mark.integration


def test_topics_of_another_run_are_refused_with_resume_and_without(
    tmp_path: Path, broker_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORA_BROKER", broker_address)
    settings = some_settings(tmp_path).model_copy(update={"name": "strangers"})
    bus = open_bus(settings, broker_address)
    bus.make_topics(Topics("strangers").specs())
    said = f"the broker has {len(Topics('strangers').specs())} topics of a run named strangers already"

    new = CliRunner().invoke(app, ["run", str(a_config(tmp_path)), "--set", "name=strangers"])
    assert (new.exit_code, said in new.stderr) == (2, True), new.stderr
    assert list((tmp_path / "runs").iterdir()) == [], "a refused run leaves no folder"

    run_dir = tmp_path / "runs" / "strangers"
    run_dir.mkdir()
    write_resolved(settings, run_dir)  # claimed, but the broker was away: it never began
    resumed = CliRunner().invoke(app, ["run", str(run_dir / RESOLVED), "--resume"])
    assert (resumed.exit_code, said in resumed.stderr) == (2, True), resumed.stderr
    assert read_resolved(run_dir).name == "strangers", "a run that was there stays there"
    bus.delete_topics(list(bus.topics(Topics("strangers").prefix)))
    bus.close()
