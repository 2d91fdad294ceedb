"""Deployments that `dora simulate` knows by name, and the figures of the paper (DORA, arXiv 2604.26256) beside them.

Rule 1: `t0_s` of a preset is fitted to the paper's sync row alone (its step, with 65 % and 73 % of rollout), so every
other mode is a prediction. `t1_s` is 0.009 of it.
Rule 2: seats are what bounds an engine there: its KV holds as many of the longest requests.
"""

from pipelines.simulate.cost import CostModel, Work
from pipelines.simulate.deployment import Deployment
from pipelines.simulate.lengths import Lognormal
from schemas.settings import Settings
from workers.runtime.errors import BadInput

NAMES = ("paper-64", "paper-128", "paper-4096")
PROMPT_TOKENS = 200
SEATS = 256
GROUP_SIZE = 16
T1_OVER_T0 = 0.009
MOVED_KV_TOKENS_PER_S = 150_000.0
"""A 32B model's KV (0.26 MB a token) over a 40 GB/s link."""
Paper = dict[str, dict[str, float]]
STEPS = 1_000_000
"""Far more than are simulated: the end of the run, where deadlines come closer, is not part of the figures."""
_PAPER_64: Paper = {
    "sync": {"step_minutes": 22.91, "tokens_per_second": 14_143, "rollout_only_share": 0.65},
    "one_step": {"step_minutes": 22.94, "tokens_per_second": 14_141, "rollout_only_share": 0.33},
    "partial": {"step_minutes": 17.38, "tokens_per_second": 19_872, "rollout_only_share": 0.46},
    "dora": {"step_minutes": 14.67, "tokens_per_second": 23_327, "rollout_only_share": 0.12},
}
_PAPER_128: Paper = {
    "sync": {"step_minutes": 20.23, "tokens_per_second": 16_070, "rollout_only_share": 0.73},
    "one_step": {"step_minutes": 14.0, "tokens_per_second": 23_200},
    "partial": {"step_minutes": 13.95, "tokens_per_second": 30_800},
    "dora": {"step_minutes": 10.46, "tokens_per_second": 34_135, "rollout_only_share": 0.24},
}


def preset(name: str) -> Deployment:
    """BadInput names those that there are."""
    law, new_max = Lognormal(1_300.0, 1.1), 30_000
    match name:
        case "paper-64":
            settings, cost = _settings(name, 16, 512, new_max), _cost(t0_s=0.02057, train_s=480.0)
            seeds, measured, paper = 5, 2, _PAPER_64
        case "paper-128":
            settings, cost = _settings(name, 32, 512, new_max), _cost(t0_s=0.02423, train_s=327.6)
            seeds, measured, paper = 5, 2, _PAPER_128
        case "paper-4096":
            # Of the paper's production run little is said: 4,096 accelerators, 64K responses, 2-4x end to end. A step
            # waits for the longest responses there, every second or third one the longest: 6 are whole rhythms.
            law, new_max = Lognormal(2_600.0, 1.1), 64_000
            settings, cost = _settings(name, 1024, 3_125, new_max), _cost(t0_s=0.03, train_s=120.0)
            seeds, measured, paper = 1, 6, {}
        case _:
            raise BadInput(f"--preset {name}: there are {', '.join(NAMES)}")
    kv_tokens = settings.engines.seats * settings.engines.tokens_per_request_max
    work = Work(law, PROMPT_TOKENS, kv_tokens)
    steps = {"warm_up": 3, "measured": measured}
    return Deployment(name, settings, cost, work, settings.engines.count, seeds=seeds, paper=paper, **steps)


def _cost(t0_s: float, train_s: float) -> CostModel:
    return CostModel(t0_s=t0_s, t1_s=T1_OVER_T0 * t0_s, train_s=train_s, kv_tokens_per_s=MOVED_KV_TOKENS_PER_S)


def _settings(name: str, engines: int, groups: int, new_max: int) -> Settings:
    return Settings.model_validate(
        {
            "name": name,
            "model": "simulated",
            "steps": STEPS,
            "group_size": GROUP_SIZE,
            "groups_per_batch": groups,
            "staleness_max": 3,
            "sampling": {"max_new_tokens": new_max},
            "engines": {
                "count": engines,
                "seats": SEATS,
                "tokens_per_request_max": PROMPT_TOKENS + new_max,
                "timeout_s": 600.0,
                "request_timeout_s": 1e7,
            },
            "dataset": [{"path": "simulated.jsonl"}],
        }
    )
