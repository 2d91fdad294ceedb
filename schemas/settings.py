"""What a person may set: one TOML file, one pydantic tree, every default, nothing else.

An unknown key is refused with the nearest name. `[vllm]`, `[megatron]` and `[kafka]` go through untouched.
Durations are seconds, sizes say their unit.
"""

import tomllib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas import settings_tree, wrong_values
from schemas.topics import RUN_NAME

PASSED_THROUGH = ("vllm", "megatron", "kafka")


class SettingsError(ValueError):
    """Bad configuration; the text names the file, the key and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Section):
    """How tokens are drawn; the trainer applies the same temperature."""

    temperature: float = Field(1.0, gt=0, le=10, description="Softmax temperature of training samples.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus; 1 = off.")
    top_k: int = Field(0, ge=0, description="Keep the k likeliest tokens; 0 = off.")
    max_new_tokens: int = Field(256, ge=1, description="Limit of a response, in tokens; a row may set its own.")
    ignore_eos: bool = Field(False, description="Go on to the limit (rows that set their own length).")

    @property
    def truncates(self) -> bool:
        """Some tokens are never drawn; rows then say how much mass was kept."""
        return self.top_p < 1 or self.top_k > 0


class Engines(Section):
    """Rollout engines: how many, how large."""

    kind: Literal["vllm", "paced"] = Field("vllm", description="vllm = real; paced = a cost table, no model.")
    count: int = Field(2, ge=1, le=4096, description="Number of engines.")
    seats: int = Field(32, ge=1, description="Requests at once in one engine.")
    kv_mib: int = Field(256, ge=1, description="KV cache of one engine, MiB.")
    kv_host_mib: int = Field(
        256, ge=0, description="Host memory for KV that leaves one engine, MiB; 0 = it is computed again."
    )
    kv_carrier: Literal["shared_memory", "flight"] = Field(
        "shared_memory", description="How it travels: on one host, or also between hosts (Arrow Flight)."
    )
    tokens_per_request_max: int = Field(1024, ge=16, description="Prompt and response together, tokens.")
    snapshot_tokens: int = Field(1024, ge=0, description="What a request loses at most if its engine dies; 0 = all.")
    threads: int = Field(1, ge=1, description="OpenMP threads of one engine.")
    timeout_s: float = Field(60.0, gt=0, description="An engine that says nothing for this long is lost.")
    start_timeout_s: float = Field(600.0, gt=0, description="An engine must have joined after this long.")
    request_timeout_s: float = Field(600.0, gt=0, description="A request older than this on one engine has failed.")


class Scheduling(Section):
    """The orchestrator's freedom."""

    live_factor: float = Field(2.0, gt=0, description="Live groups at most, in batches.")
    oversample_factor: float = Field(1.5, ge=1, description="Mode oversample: groups opened per step, in batches.")
    legacy_fill: bool = Field(False, description="Fill old versions' idle seats with new groups of their version.")
    open_every: int = Field(1, ge=1, description="Groups are opened under every so many-th version only.")
    partition: Literal["packed", "proportional"] = Field("packed", description="How versions share the engines.")
    rebalance_period_s: float = Field(5.0, gt=0, description="Partition again at least this often.")
    failures_max: int = Field(3, ge=1, description="Failures of one sample until its group is voided.")
    group_policy: Literal["all", "partial"] = Field(
        "all", description="A sample over failures_max voids its group; partial = not while two others are left."
    )
    dynamic_sampling: bool = Field(False, description="Void groups whose outcomes do not vary (no_signal).")
    voids_in_row_max: int = Field(
        256, ge=1, description="Groups voided in a row, surplus ones apart, until the run stops."
    )
    weights_keep: int = Field(2, ge=1, description="Versions kept beyond those that something needs.")
    weights_keep_every: int = Field(0, ge=0, description="A version that this divides is kept for good; 0 = none.")


class Training(Section):
    """The objective and the optimizer."""

    kind: Literal["megatron", "paced"] = Field("megatron", description="megatron = real; paced = sleeps, no model.")
    learning_rate: float = Field(1e-6, ge=0, description="AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW.")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm.")
    clip_low: float = Field(0.2, ge=0, le=1, description="Ratio is clipped below 1 - clip_low; 1 = not.")
    clip_high: float = Field(0.28, ge=0, description="Ratio is clipped above 1 + clip_high.")
    clip_dual: float = Field(0.0, ge=0, description="Largest ratio where the advantage is negative; 0 = off.")
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = Field(
        "grpo", description="Relative to a group's other samples; reinforce_pp = to all of the step."
    )
    loss_level: Literal["token", "sequence", "constant"] = Field(
        "token", description="What weighs the same in a batch; constant = a token, by samples x max_new_tokens."
    )
    ratio: Literal["token", "sequence", "cispo"] = Field(
        "token", description="Of what the ratio is; sequence = GSPO, cispo = of a token, as a clipped weight."
    )
    decoupled: bool = Field(False, description="Ratio to the version at the start of the step, not to what sampled.")
    tis_cap: float = Field(0.0, ge=0, description="Largest weight of that version over what sampled; 0 = no weight.")
    tis_level: Literal["token", "sequence", "geometric"] = Field("token", description="Of what that weight is.")
    tis_mask: bool = Field(False, description="Leave out what weighs above tis_cap or below 1 / tis_cap.")
    kl_coef: float = Field(0.0, ge=0, description="Of the k3 KL to version 0, of which the trainer then keeps a copy.")
    kl_refresh_steps: int = Field(
        0, ge=0, description="Every so many steps that copy becomes the version then; 0 = never."
    )
    kl_version: int = Field(
        0, ge=0, description="The version that copy becomes, once it is there, for the rest of the run."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Of the entropy, which the loss then rewards.")
    overlong_mask: bool = Field(False, description="Responses that were cut at their limit are not trained on.")
    overlong_penalty_tokens: int = Field(
        0, ge=0, description="The reward falls by up to 1 over the last so many tokens before the limit; 0 = off."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up; linear and cosine fall to 0 at `steps`."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises.")
    updates_per_step: int = Field(1, ge=1, description="Optimizer updates per step; each multiplies the lag.")
    micro_batch_tokens: int = Field(4096, ge=1, description="Tokens of one forward pass; a shared prompt counts once.")
    packing: bool = Field(True, description="false = each sample filled up to the longest beside it; the same result.")
    data_parallel: int = Field(1, ge=1, description="Copies of the model, each trained on its share of a step.")
    threads: int = Field(1, ge=1, description="OpenMP threads of the trainer, of each of its processes.")
    checkpoint_every: int = Field(10, ge=1, description="Steps between checkpoints.")
    checkpoints_keep: int = Field(2, ge=1, description="Checkpoints kept.")

    @property
    def reference_changes(self) -> bool:
        """The reference of the KL is not version 0 all along, so a checkpoint must hold it."""
        return bool(self.kl_refresh_steps or self.kl_version)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if 0 < self.clip_dual <= 1:
            raise ValueError("clip_dual is a ratio: use more than 1, or 0 for none")
        if self.clip_dual and self.ratio == "cispo":
            raise ValueError("clip_dual does nothing with ratio = cispo, which never loses a gradient: use 0")
        if 0 < self.tis_cap < 1:
            raise ValueError("tis_cap below 1 would also lower the weight of what needs no correction: use 1 or more")
        if self.tis_cap and not self.decoupled:
            raise ValueError(
                "tis_cap needs decoupled = true: otherwise the ratio itself is to what sampled, and a weight would "
                "correct twice"
            )
        if self.kl_refresh_steps and not self.kl_coef:
            raise ValueError("kl_refresh_steps needs a kl_coef: without one there is no reference")
        if self.kl_version and not self.kl_coef:
            raise ValueError("kl_version needs a kl_coef: without one there is no reference")
        if self.kl_version and self.kl_refresh_steps:
            raise ValueError("kl_version stays the reference, kl_refresh_steps replaces it: use one of the two")
        if self.tis_mask and not self.tis_cap:
            raise ValueError("tis_mask needs a tis_cap")
        return self


class Reward(Section):
    """Graders run in subprocesses that are killed at their limits."""

    workers: int = Field(1, ge=1, description="Scorer processes.")
    pool: int = Field(2, ge=1, description="Grader subprocesses of one scorer.")
    timeout_s: float = Field(10.0, gt=0, description="Limit of one grading.")
    memory_mib: int = Field(2048, ge=64, description="Address space of one grader subprocess.")
    path: str = Field("", description="Folder of your own graders' modules; empty = the configuration's folder.")


class Columns(Section):
    """Which columns of the file are which."""

    prompt: str = Field("prompt", min_length=1, description="Column of the prompt.")
    answer: str = Field("answer", min_length=1, description="Column of the reference answer.")


class Dataset(Section):
    """Rows to train or evaluate on. Columns of a row: `prompt`, `answer`; if you like `id` (unique), `max_new_tokens`,
    `metadata` (an object). All others are added to the metadata, which graders read."""

    path: str = Field(
        "",
        description="JSONL, Parquet (a file or a folder of them) or a folder that `datasets` saved, relative to the "
        "configuration's folder; or use `task`.",
    )
    task: str = Field("", description="`reasoning_gym:<task>`: rows are made, not read.")
    rows: int = Field(0, ge=0, description="Rows to make for `task`; 0 = all of a file.")
    grader: str = Field("last_integer", description="last_integer, math_verify, reasoning_gym:<task>, module:function.")
    purpose: Literal["train", "eval"] = Field("train", description="eval = held out, never trained.")
    weight: float = Field(1.0, gt=0, description="Share of this dataset among those of its purpose.")
    template: Literal["chat", "plain"] = Field("chat", description="chat = the tokenizer's chat template.")
    columns: Columns = Columns()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.path) == bool(self.task):
            raise ValueError("set exactly one of `path` and `task`")
        if self.task and not self.rows:
            raise ValueError("`task` needs `rows` (how many to make)")
        return self


class Evaluation(Section):
    """Held-out rows (`purpose = "eval"`), sampled at the first and the last version."""

    samples: int = Field(0, ge=0, description="Samples per row; 0 = no evaluation.")
    temperature: float = Field(1.0, gt=0, le=10, description="Softmax temperature of held-out samples.")


class Broker(Section):
    """Kafka."""

    address: str = Field("", description="host:port of a cluster; empty = an embedded broker. DORA_BROKER overrides.")
    timeout_s: float = Field(120.0, gt=0, description="Away for longer: the run stops and can be resumed.")
    replication: int = Field(1, ge=1, description="Replication factor of topics (3 on a cluster).")


class Prefect(Section):
    """The view of the run."""

    enabled: bool = Field(True, description="false = no server, no UI; the run itself is the same.")
    address: str = Field("", description="API address; empty = a local server. DORA_PREFECT overrides.")


class Prometheus(Section):
    """Figures of each process, for those who watch many."""

    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Of the first process's endpoint on 127.0.0.1, the others follow; 0 = none. docs/WATCHING.md",
    )


class Settings(Section):
    """One run."""

    name: str = Field("", description="Run name; empty = the configuration's name and a number.")
    runs_dir: str = Field("runs", description="Folder of run folders.")
    mode: Literal["sync", "one_step", "partial", "oversample", "dora"] = Field(
        "dora",
        description="sync = each step waits for its own rollouts (K = 0). one_step = K 1, all engines change version "
        "together. partial = requests go on under each new version. oversample = K 0, more groups than a step needs, "
        "the rest is voided.",
    )
    seed: int = Field(0, ge=0, description="Of the order of rows and of every sample.")
    steps: int = Field(0, ge=0, description="Training steps; 0 = until the datasets' epochs are used up.")
    epochs: int = Field(0, ge=0, description="Passes over the training rows; 0 = as many as `steps` need.")
    model: str = Field(
        description="Hugging Face folder, or `builtin:smollm2`, `builtin:tiny` (made once by `dora run`)."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="Of published weights and of all forward passes. auto = bfloat16 where it is fast, else float32; "
        "settled when the run starts.",
    )
    group_size: int = Field(8, ge=1, description="Samples per prompt (G).")
    groups_per_batch: int = Field(8, ge=1, description="Groups per step (B).")
    staleness_max: int = Field(2, ge=0, le=64, description="Largest lag at the gradient (K); 0 = synchronous.")
    sampling: Sampling = Sampling()
    engines: Engines = Engines()
    scheduling: Scheduling = Scheduling()
    training: Training = Training()
    reward: Reward = Reward()
    dataset: tuple[Dataset, ...] = ()
    evaluation: Evaluation = Evaluation()
    broker: Broker = Broker()
    prefect: Prefect = Prefect()
    prometheus: Prometheus = Prometheus()
    vllm: dict[str, Any] = Field(default_factory=dict, description="Passed to vLLM's EngineArgs.")
    megatron: dict[str, Any] = Field(default_factory=dict, description="Passed to Megatron's configurations.")
    kafka: dict[str, Any] = Field(default_factory=dict, description="Passed to every Kafka client.")

    @property
    def lag_max(self) -> int:
        """K of the mode: `sync` and `oversample` are K = 0, `one_step` is K = 1."""
        return {"sync": 0, "oversample": 0, "one_step": 1}.get(self.mode, self.staleness_max)

    @property
    def live_max(self) -> int:
        """Live groups at most: `live_factor x B`, with K = 0 exactly B, or `oversample_factor x B` in that mode."""
        if self.mode == "oversample":
            return int(self.scheduling.oversample_factor * self.groups_per_batch)
        return self.groups_per_batch if self.lag_max == 0 else int(self.scheduling.live_factor * self.groups_per_batch)

    @property
    def mixes_versions(self) -> bool:
        """A trajectory may have tokens of several versions (I4 does not hold)."""
        return self.mode == "partial"

    def dataset_names(self) -> list[str]:
        """What rows call each dataset (`task` in every record of theirs); unique among those of one purpose."""
        names: list[tuple[str, str]] = []
        for place, dataset in enumerate(self.dataset):
            name = dataset.task or PurePath(dataset.path).stem
            while (name, dataset.purpose) in names:
                name += f"-{place}"
            names.append((name, dataset.purpose))
        return [name for name, _ in names]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.name and not RUN_NAME.fullmatch(self.name):
            raise ValueError("name: use 1 to 80 letters, digits, '-' or '_'")
        if bool(self.steps) == bool(self.epochs):
            raise ValueError("set exactly one of `steps` and `epochs` (they would contradict each other)")
        if self.group_size == 1 and self.training.advantage != "reinforce_pp":
            raise ValueError(
                f"group_size = 1 gives a group-relative advantage ({self.training.advantage}) nothing to compare: "
                "use 2 or more"
            )
        if self.group_size == 1 and self.scheduling.dynamic_sampling:
            raise ValueError(
                "scheduling.dynamic_sampling would void every group of group_size = 1: outcomes never vary"
            )
        if self.live_max < 1:
            raise ValueError("scheduling.live_factor x groups_per_batch is below 1 group: nothing could ever open")
        if self.lag_max and self.scheduling.live_factor < 1:
            raise ValueError("scheduling.live_factor below 1 can never fill a batch")
        every = self.scheduling.open_every
        for key, used in (("legacy_fill", self.scheduling.legacy_fill), ("open_every", every > 1)):
            if used and self.mode != "dora":
                raise ValueError(f'scheduling.{key} needs mode = "dora": mode {self.mode} opens at the newest only')
        if every > max(1, self.staleness_max):
            raise ValueError(f"scheduling.open_every = {every}: at most staleness_max, or groups open too old to train")
        if self.engines.count * self.engines.seats < self.group_size:
            raise ValueError(
                f"all engines together have {self.engines.count * self.engines.seats} seats, "
                f"a group needs {self.group_size}: raise engines.count or engines.seats"
            )
        if self.sampling.truncates and self.engines.kind == "paced":
            raise ValueError("sampling.top_p and sampling.top_k: paced engines draw without a model: use 1 and 0")
        self._training_fits()
        if not any(d.purpose == "train" for d in self.dataset):
            raise ValueError('no [[dataset]] with purpose = "train"')
        if self.evaluation.samples and not any(d.purpose == "eval" for d in self.dataset):
            raise ValueError('evaluation.samples is set, but no [[dataset]] has purpose = "eval"')
        return self

    def _training_fits(self) -> None:
        training = self.training
        if training.schedule != "constant" and not self.steps:
            raise ValueError(f"training.schedule = {training.schedule} falls until the last step: set `steps`")
        if self.steps and training.warmup_steps >= self.steps and training.warmup_steps:
            raise ValueError(f"training.warmup_steps = {training.warmup_steps} leaves none of {self.steps} steps")
        if self.steps and training.kl_version >= self.steps:
            raise ValueError(
                f"training.kl_version = {training.kl_version} is never a reference: the last step, "
                f"{self.steps - 1}, begins with version {self.steps - 1}"
            )
        if self.sampling.ignore_eos and (training.overlong_mask or training.overlong_penalty_tokens):
            raise ValueError("training.overlong_*: with sampling.ignore_eos every response is cut at its limit")
        limit = self.sampling.max_new_tokens
        if training.overlong_penalty_tokens > limit:
            raise ValueError(f"training.overlong_penalty_tokens is above sampling.max_new_tokens = {limit}")

    def notes(self) -> list[str]:
        """What a person should know of this configuration, in sentences."""
        said = []
        if self.training.updates_per_step > 1:
            said.append(
                f"training.updates_per_step = {self.training.updates_per_step}: a token may be up to "
                f"{(self.lag_max + 1) * self.training.updates_per_step - 1} optimizer updates old at the gradient, "
                f"although lag is bounded by {self.lag_max} versions"
            )
        if self.mixes_versions:
            said.append(
                'mode = "partial": a trajectory may have tokens of several versions; `engine_path` says which, and lag '
                "counts from the version under which its group was opened"
            )
        return said


def parse_settings(text: str, source: str, overrides: Iterable[str] = ()) -> Settings:
    """Settings of a TOML text. `source` names it in errors; `overrides` are `a.b=value` (TOML values, bare words are
    strings). SettingsError names the key and the nearest one that exists."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source}: not TOML: {error}") from error
    try:
        for override in overrides:
            settings_tree.override(tree, override)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    unknown = list(settings_tree.unknown(tree, Settings, PASSED_THROUGH))
    if unknown:
        raise SettingsError("\n".join(f"{source}: {fault}" for fault in unknown))
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        lines = []
        for fault in error.errors(include_url=False):
            where = ".".join(str(part) for part in fault["loc"])
            lines.append(f"{source}: {where + ': ' if where else ''}{wrong_values.sentence(Settings, fault)}")
        raise SettingsError("\n".join(lines)) from error
