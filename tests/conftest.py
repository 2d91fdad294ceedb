"""What holds for every test.

Rule 1: one OpenMP thread per process; two spinning ones on two cores take ten times as long.
Rule 2: tests with real parts (contract, integration) run one after another on one xdist worker, the others beside them.
Rule 3: there is one Kafka broker for the whole test session; tests share it, each takes a run name of its own.
"""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite(
    "tests.integration.whole_run",
    "tests.integration.kv_two",
    "tests.house",
    "tests.unit.rollout_house",
    "tests.unit.trainer_world",
)
from pipelines.local_services import start_kafka  # noqa: E402

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored, and so its children
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)  # cores are shared: no time per example
hypothesis.settings.load_profile("house")


class RealPartsOnOneWorker(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests go to one worker; those of the folders with real parts all go to the same one, first."""

    def _split_scope(self, nodeid: str) -> str:
        real = nodeid.startswith(("tests/contract/", "tests/integration/"))
        return "real parts" if real else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> RealPartsOnOneWorker:
    config.option.loadscopereorder = False  # in the order of collection: contract and integration are first
    return RealPartsOnOneWorker(config, log)


@pytest.fixture(scope="session")
def broker_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of an embedded Apache Kafka that ends with the session."""
    broker = start_kafka(tmp_path_factory.mktemp("broker"))
    yield broker.address
    broker.stop()
