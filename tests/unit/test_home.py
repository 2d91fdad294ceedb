"""The home that commands share: users, launches, and the keeper with small fake services."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipelines import home, keeper, local_services, updown
from pipelines.children import identity_of
from pipelines.faults import ServiceFailed
from pipelines.home import Kept, Launch
from pipelines.keeper import Keeper
from pipelines.local_services import Service
from workers.runtime import clock

LIMIT_S = 60.0


def _until(true: object) -> None:
    limit = clock.monotonic_s() + LIMIT_S
    while not true():  # type: ignore[operator]
        assert clock.monotonic_s() < limit
        threading.Event().wait(0.02)


class Fakes:
    """Services that are processes which wait; `started` says which, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.live: dict[str, Service] = {}
        monkeypatch.setattr(local_services, "start_kafka", lambda folder: self._start("kafka", folder))
        monkeypatch.setattr(local_services, "start_prefect", lambda folder: self._start("prefect", folder))
        monkeypatch.setattr(local_services, "start_worker", lambda folder, *_: self._start("worker", folder))
        monkeypatch.setattr(keeper, "on_stop_signals", lambda _: None)
        monkeypatch.setattr(keeper, "RESTART_PAUSE_S", 0.0)

    def _start(self, name: str, folder: Path) -> Service:
        self.started.append(name)
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
        self.live[name] = Service(name, f"{name}:1", process.pid, folder / f"{name}.log", process)
        return self.live[name]

    def keep(self, folder: Path) -> threading.Thread:
        thread = threading.Thread(target=Keeper(folder, "", os.getpid()).run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_a_keeper_ends_its_services_after_the_last_user_and_not_before(tmp_path: Path, fakes: Fakes) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    home.join(tmp_path, os.getpid())
    home.join(tmp_path, other.pid)
    thread = fakes.keep(tmp_path)
    _until(lambda: (kept := home.kept(tmp_path)) is not None and kept.ready)
    assert fakes.started == ["prefect", "worker"]
    home.leave(tmp_path, os.getpid())
    thread.join(1.0)
    assert thread.is_alive(), "the other one uses it"
    other.kill()  # a user that dies is none
    other.wait()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert home.kept(tmp_path) is None
    assert all(service.process.poll() is not None for service in fakes.live.values())


def test_a_service_that_ends_is_started_again_and_up_brings_a_broker_later(tmp_path: Path, fakes: Fakes) -> None:
    home.join(tmp_path, os.getpid())
    thread = fakes.keep(tmp_path)
    _until(lambda: (kept := home.kept(tmp_path)) is not None and kept.ready)
    fakes.live["prefect"].stop()
    _until(lambda: fakes.started == ["prefect", "worker", "prefect"])
    (tmp_path / home.UP).touch()
    _until(lambda: (kept := home.kept(tmp_path)) is not None and kept.broker == "kafka:1")
    home.leave(tmp_path, os.getpid())
    thread.join(1.0)
    assert thread.is_alive(), "people want it up"
    (tmp_path / home.UP).unlink()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_keeper_that_cannot_start_is_said_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_keeper(folder: Path, address: str) -> "subprocess.Popen[bytes]":
        (folder / "keeper.log").write_text(f"prefect: no such thing {address}")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(home, "start_keeper", start_keeper)
    with pytest.raises(ServiceFailed, match="no such thing there"):
        updown.wait_ready(tmp_path, "there")


def test_what_a_dead_keeper_said_does_not_count(tmp_path: Path) -> None:
    home.say(tmp_path, Kept(keeper=identity_of(os.getpid()), prefect="http://127.0.0.1:4200/api", ready=True))
    kept = home.kept(tmp_path)
    assert kept is not None
    assert kept.ui == "http://127.0.0.1:4200"
    home.say(tmp_path, Kept(keeper=identity_of(os.getpid()) | {"created": 0.0}, ready=True))
    assert home.kept(tmp_path) is None


def test_a_given_server_has_a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(home.HOME_VARIABLE, str(tmp_path))
    places = {home.folder(), home.folder("http://a/api"), home.folder("http://b/api")}
    assert len(places) == 3
    assert all(tmp_path in (place, place.parent) for place in places)


def test_an_environment_is_readable_by_its_owner_alone_and_another_servers_address_is_not_in_it(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "a")
    launch.ask("paced", {"TOKEN": "secret", "PREFECT_API_URL": "http://elsewhere/api"})
    assert launch.asked() == {"stem": "paced", "environment": {"TOKEN": "secret"}}
    assert stat.S_IMODE((launch.folder / "asked.json").stat().st_mode) == 0o600
    launch.note("ended", code=3)
    assert launch.noted("ended") == {"code": 3}
    launch.forget("ended")
    assert launch.noted("ended") is None
    assert json.loads((launch.folder / "asked.json").read_text())["stem"] == "paced"
