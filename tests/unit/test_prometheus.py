"""Endpoints for Prometheus: what a process measures is there under a documented name; the dashboard asks for it."""

import json
import logging
import re
import socket
import urllib.request
from pathlib import Path

import pytest

from pipelines.processes import metrics_port, specs
from schemas.messages import Heartbeat
from tests.unit.mind_driver import played, settings_of
from tests.unit.pipeline_parts import some_settings
from tests.unit.reward_rows import a_process
from tests.unit.test_metrics import Live
from tests.unit.test_replay import trained
from workers.orchestrator.state import Mind
from workers.rollout.partials import figures_of
from workers.runtime.metrics import ADDRESS, Figures, name_of
from workers.runtime.process import Process, _open_figures
from workers.trainer import loss_figures

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\b(dora_[a-z0-9_]+|process_[a-z_]+)\b")
OF_EVERY_PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind((ADDRESS, 0))
        return int(free.getsockname()[1])


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://{ADDRESS}:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_an_endpoint_shows_the_figures_of_now_with_run_process_and_lag() -> None:
    figures, port = Figures(), free_port()
    figures.open(port, "r", "trainer")
    assert set(NAME.findall(read(port))) >= OF_EVERY_PROCESS
    figures.show({"loss": 0.25, "lag_0_ess": 1.0, "lag_2_ess": 0.5})
    said = read(port)
    assert 'dora_trainer_loss{process="trainer",run="r"} 0.25' in said
    assert 'dora_trainer_ess_by_lag{lag="0",process="trainer",run="r"} 1.0' in said
    assert 'dora_trainer_ess_by_lag{lag="2",process="trainer",run="r"} 0.5' in said
    figures.show({"loss": 0.5})
    assert "ess_by_lag" not in read(port)


def test_names_are_those_that_prometheus_allows() -> None:
    assert name_of("rollout", "decode_s") == ("dora_rollout_decode_s", {})
    assert name_of("orchestrator", "groups_live/lag_12") == ("dora_orchestrator_groups_live_by_lag", {"lag": "12"})
    assert name_of("supervisor", "restarts/rollout-0") == ("dora_supervisor_restarts_rollout_0", {})
    assert name_of("trainer", "lag_mean") == ("dora_trainer_lag_mean", {})


def test_a_port_that_is_taken_is_said_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        taken.listen()
        process = Process("trainer", settings_of(), tmp_path, metrics_port=taken.getsockname()[1])
        logging.getLogger("trainer").addHandler(caplog.handler)
        try:
            _open_figures(process)
        finally:
            logging.getLogger("trainer").removeHandler(caplog.handler)
    assert "no_prometheus_endpoint" in caplog.text


def test_each_process_of_a_run_has_a_port_of_its_own_or_none_has(tmp_path: Path) -> None:
    settings = some_settings(tmp_path, prometheus={"port": 9400}, engines={"kind": "paced", "count": 3})
    all_ = [(spec.kind, spec.number) for spec in specs(settings, tmp_path, "b")]
    assert [metrics_port(settings, *one) for one in all_] == list(range(9400, 9400 + len(all_)))
    off = settings.model_copy(update={"prometheus": settings.prometheus.model_copy(update={"port": 0})})
    assert {metrics_port(off, *one) for one in all_} == {0}
    assert metrics_port(settings, "rollout", 99) == 0


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """All names that processes show, from what each really measures."""
    mind, found = Mind(settings_of()), set(OF_EVERY_PROCESS)
    for event in played().events:
        mind.on(event)
        found |= {name_of("orchestrator", figure)[0] for figure in mind.figures()}
    heartbeat = Heartbeat(engine=0, incarnation=1, version=2, running=1, waiting=0, kv_tokens=3)
    found |= {name_of("rollout", figure)[0] for figure in figures_of(heartbeat)}
    for point in trained(tmp_path_factory.mktemp("trained")).metrics():
        found |= {name_of("trainer", figure)[0] for figure in point.values}
    sums = dict.fromkeys(("finite", "tokens", "drift", "drift_squared", "ratio_max"), 1.0)
    by_lag = loss_figures.figures(sums | {f"lag_1_{name}": value for name, value in sums.items()})
    found |= {name_of("trainer", figure)[0] for figure in by_lag}
    return found | _of_scorer(tmp_path_factory.mktemp("scored"))


def _of_scorer(folder: Path) -> set[str]:
    from workers.reward.service import Scorer

    scorer = Scorer(process := a_process(folder), Live(folder / "r").bus, 0)
    scorer._measured_at = float("-inf")
    scorer._measure()
    scorer.close()
    return {name_of("reward", figure)[0] for figure in process.figures._values}


def test_every_query_of_the_dashboard_names_a_metric_that_there_is(known: set[str]) -> None:
    board = json.loads((ROOT / "infra/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert len(queries) > 20
    assert all(NAME.findall(query) for query in queries)
    assert {name for query in queries for name in NAME.findall(query)} - known == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_page_on_watching_names_every_metric_of_the_dashboard_and_none_that_there_is_not(known: set[str]) -> None:
    page = {name for name in NAME.findall((ROOT / "docs/WATCHING.md").read_text()) if name != "dora_run"}
    board = set(NAME.findall((ROOT / "infra/grafana.json").read_text()))
    assert board - page == set()
    assert page - known - {"dora_orchestrator_decide_s"} == set()
