"""Services on this machine for those who bring none: an Apache Kafka broker (KRaft), a Prefect server and worker.

Rule 1: one service per home folder, data kept there. The service itself holds the lock (`kafka.lock`, `prefect.lock`),
so the lock ends with it, however it ends; a second start on the home is refused, a start after a crash goes on.
Rule 2: a service dies with the thread that started it (Linux). Start it from one that lives as long.
Rule 3: it listens on loopback only, on free ports. A home keeps its ports while they are free: clients that wait for
a broker that starts again find it where it was.
Rule 4: what others wait for has a limit, and what goes wrong is a `ServiceFailed` with the end of the service's log.
"""

import base64
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipelines import kafka_java
from pipelines.faults import ServiceFailed, StartStopped
from workers.runtime.errors import DoraError

START_S_MAX = 180.0
STOP_S_MAX = 20.0
FRESH_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to clients: it takes none of them between the choice and the service's start."""
_PR_SET_PDEATHSIG = 1

BROKER_SETTINGS: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "message.max.bytes": "67108864",
    "replica.fetch.max.bytes": "67108864",
    "log.retention.ms": "-1",
    "offsets.retention.minutes": "5256000",
    # A broker that was killed is let in again after 6 s, not 9 s. Less, and a busy machine loses a broker that lives.
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.election.timeout.ms": "300",
    "controller.quorum.fetch.timeout.ms": "600",
}
"""What records, groups and transactions see of a single broker; `infra/docker-compose.yml` says the same."""
_SMALL = {"num.network.threads": "2", "num.io.threads": "2", "log.cleaner.dedupe.buffer.size": "2097152"}
_LOG4J = """Configuration:
  Appenders:
    Console: {name: C, PatternLayout: {pattern: '%d %p %c{1} %m%n'}}
  Loggers:
    Root: {level: WARN, AppenderRef: {ref: C}}
"""


class HomeInUse(DoraError):
    """Another service runs on this home."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service that runs. `address`: host:port of Kafka, API address of Prefect."""

    name: str
    address: str
    pid: int
    log: Path
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End it and what it started: SIGTERM, after STOP_S_MAX SIGKILL. Twice is fine."""
        _signal(self.pid, signal.SIGTERM, self.process)
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to it and to what it started."""
        _signal(self.pid, signal.SIGKILL, self.process)
        self.process.wait()


def start_kafka(home: Path, *, wait: bool = True, stopped: Callable[[], bool] = lambda: False) -> Service:
    """An Apache Kafka broker with its data in `home`. HomeInUse, ServiceFailed, StartStopped once `stopped` says so.
    Without `wait` it may not answer yet.

    The first start on a machine fetches the jars (43 MB); later ones need no network.
    """
    home = home.resolve()
    folder = home / "kafka"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(home, "kafka") as lock:
        broker, controller = _ports(lock, 2)
        properties = _write_properties(folder, broker, controller)
        (folder / "log4j2.yaml").write_text(_LOG4J)
        java = [kafka_java.java(), "-Xmx384m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        java += [f"-Dlog4j2.configurationFile={(folder / 'log4j2.yaml').as_uri()}", "-cp", kafka_java.classpath()]
        if not (folder / "data" / "meta.properties").exists():
            _format(java, properties, home / "kafka.log", stopped)
        return _start(
            lock,
            name="kafka",
            command=[*java, "kafka.Kafka", str(properties)],
            folder=folder,
            env=os.environ,
            address=f"127.0.0.1:{broker}",
            ports=(broker, controller),
            healthy=(lambda: _listens(broker)) if wait else None,
            stopped=stopped,
        )


def start_prefect(home: Path) -> Service:
    """A Prefect server with its database in `home`/prefect. HomeInUse, ServiceFailed."""
    home = home.resolve()
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    with _lock(home, "prefect") as lock:
        (port,) = _ports(lock, 1)
        address = f"http://127.0.0.1:{port}/api"
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": address,
            "PREFECT_SERVER_API_HOST": "127.0.0.1",
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "DO_NOT_TRACK": "1",
        }
        return _start(
            lock,
            name="prefect",
            command=[sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            folder=home / "prefect",
            env=env,
            address=address,
            ports=(port,),
            healthy=lambda: _answers(f"{address}/health"),
        )


def place_of(folder: Path) -> str:
    """The name of this checkout on this machine, for a Prefect server that several share: pool and deployments."""
    return f"{socket.gethostname()}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]}"


def start_worker(home: Path, address: str, place: str) -> Service:
    """A Prefect worker for the runs of `place`, on the server at `address`. HomeInUse, ServiceFailed."""
    home = home.resolve()
    ready = home / "worker.ready"
    with _lock(home, "worker") as lock:
        ready.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": address,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
            "DO_NOT_TRACK": "1",
            "DORA_HOME": str(home),
        }
        return _start(
            lock,
            name="worker",
            command=[sys.executable, "-m", "pipelines.deployments", place, str(ready)],
            folder=Path.cwd(),
            env=env,
            address=place,
            ports=(),
            healthy=ready.exists,
        )


def _lock(home: Path, name: str) -> IO[str]:
    """The home's lock file, locked. It tells who holds it: `{pid, address, ports}`."""
    file = (home / f"{name}.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        said = _said(file)
        file.close()
        who = f"pid {said['pid']}, {said['address']}" if "pid" in said else "it is just starting"
        raise HomeInUse(f"{name} runs already on {home} ({who}): stop it first, or use another home") from error
    return file


def _said(lock: IO[str]) -> dict[str, object]:
    lock.seek(0)
    text = lock.read()
    try:
        said = json.loads(text)
    except json.JSONDecodeError:  # empty, or its writer was killed
        return {}
    return said if isinstance(said, dict) else {}


def _ports(lock: IO[str], count: int) -> list[int]:
    """The home's ports of last time if they are free, else others."""
    before = _said(lock).get("ports")
    wanted = before if isinstance(before, list) and len(before) == count else [0] * count
    ports, held = [], []
    for port in wanted:
        fresh = [one for one in random.sample(FRESH_PORTS, 20) if one not in ports]
        for attempt in [int(port), *fresh, 0] if port else [*fresh, 0]:
            probe = socket.socket()
            held.append(probe)  # kept open until all are found, so that they differ
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", attempt))
            except OSError:
                continue
            ports.append(probe.getsockname()[1])
            break
    for probe in held:
        probe.close()
    return ports


def _start(
    lock: IO[str],
    *,
    name: str,
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    address: str,
    ports: Sequence[int],
    healthy: Callable[[], bool] | None,
    stopped: Callable[[], bool] = lambda: False,
) -> Service:
    """The service, once it is healthy (None: at once)."""
    log = Path(lock.name).with_suffix(".log")
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: the child may not load anything
    parent = os.getpid()

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock.fileno()],
            preexec_fn=die_with_parent,  # noqa: PLW1509  it takes no lock and loads nothing
        )
    lock.truncate(0)
    lock.write(json.dumps({"pid": process.pid, "address": address, "ports": list(ports)}))
    lock.flush()
    service = Service(name, address, process.pid, log, process)
    if healthy is None:
        return service
    try:
        _wait(service, healthy, stopped)
    except StartStopped:
        service.kill()  # nothing of ours is in it yet
        raise
    except BaseException:
        service.stop()
        raise
    return service


def _wait(service: Service, healthy: Callable[[], bool], stopped: Callable[[], bool]) -> None:
    for _ in range(int(START_S_MAX / 0.1)):
        if stopped():
            raise StartStopped(f"{service.name} was not waited for")
        try:
            code = service.process.wait(0.1)
        except subprocess.TimeoutExpired:
            if healthy():
                return
            continue
        raise ServiceFailed(f"{service.name} ended with code {code} at its start; {_tail(service.log)}")
    raise ServiceFailed(f"{service.name} did not answer within {START_S_MAX:.0f} s; {_tail(service.log)}")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
    return "\n".join([f"the end of {log}:", *lines])


def _signal(group: int, number: signal.Signals, process: subprocess.Popen[bytes]) -> None:
    """To the whole group, but never to a group that might be someone else's by now."""
    if process.poll() is None:
        os.killpg(group, number)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _write_properties(folder: Path, broker: int, controller: int) -> Path:
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": "data",  # of the folder that it runs in: no name of a home can upset the file
        **BROKER_SETTINGS,
        **_SMALL,
    }
    path = folder / "server.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="ascii")
    return path


def _format(java: Sequence[str], properties: Path, log: Path, stopped: Callable[[], bool]) -> None:
    """Make the data folder; once per home. StartStopped."""
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    tool = [*java, "kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", cluster, "-c", str(properties)]
    with log.open("ab") as output:
        process = subprocess.Popen(tool, cwd=properties.parent, stdout=output, stderr=output)
    while (code := process.poll()) is None:
        if stopped():
            process.kill()
            process.wait()
            raise StartStopped("kafka was not waited for")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    if code:
        raise ServiceFailed(f"kafka could not format its data folder (code {code}); {_tail(log)}")
