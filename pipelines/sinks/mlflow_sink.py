"""Figures for MLflow, `FOLDER/mlflow.db`: `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`; all runs of a
folder are runs of the experiment `dora`.

The store keeps a figure that it is given twice once (its key is name, time, step, value). So a point that was written
in part is written again; its offset is a figure too, written last.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pipelines.sinks.base import OFFSET, Point, missing

EXPERIMENT = "dora"
METRICS_PER_CALL_MAX = 1000
"""MLflow's own limit."""


class MlFlow:
    def __init__(self, folder: Path, run: str) -> None:
        """BadInput if the library is not installed."""
        try:
            import sqlalchemy  # noqa: F401  (mlflow asks for it only when it needs it)
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError as error:
            raise missing(error, "mlflow") from error
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        place = experiment.experiment_id if experiment else self._client.create_experiment(EXPERIMENT)
        there = self._client.search_runs([place], f"attributes.run_name = '{run}'")
        found = there[0] if there else self._client.create_run(place, run_name=run)
        self._run: str = found.info.run_id
        said = self._client.get_metric_history(self._run, OFFSET)
        self._position = max((int(one.value) + 1 for one in said), default=0)

    def position(self) -> int:
        return self._position

    def write(self, points: Sequence[Point]) -> None:
        metrics = [
            self._metric(name, value, point.at // 1000, point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), METRICS_PER_CALL_MAX):
            self._client.log_batch(self._run, metrics[start : start + METRICS_PER_CALL_MAX])
        last = points[-1]
        self._client.log_metric(self._run, OFFSET, last.offset, last.at // 1000, last.step)
        self._position = last.offset + 1

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the figures are in it; this is a label
            self._client.set_terminated(self._run)
