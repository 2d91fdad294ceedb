"""What a person may set, and what is said when it is wrong."""

import pytest

from schemas.settings import Settings, SettingsError, parse_settings

SMALL = """
model = "builtin:tiny"
steps = 4

[[dataset]]
path = "rows.jsonl"
"""


def _error(text: str = SMALL, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, "a.toml", overrides)
    return str(caught.value)


def _settings(*overrides: str) -> Settings:
    return parse_settings(SMALL, "a.toml", overrides)


def test_a_small_file_is_a_run_with_defaults() -> None:
    settings = _settings()
    assert (settings.mode, settings.staleness_max, settings.group_size, settings.groups_per_batch) == ("dora", 2, 8, 8)
    assert settings.live_max == 16


def test_not_toml_names_the_file_and_the_line() -> None:
    assert _error("steps = ").startswith("a.toml: not TOML: ")
    assert "line 2" in _error("steps = 1\nseed 3\n")


def test_unknown_key_is_refused_with_the_nearest_name() -> None:
    assert _error("stalenes_max = 2\n" + SMALL) == "a.toml: unknown key stalenes_max: did you mean staleness_max?"


def test_unknown_key_in_a_table_names_the_table() -> None:
    assert _error(SMALL, "engines.seat=3") == "a.toml: unknown key engines.seat: did you mean engines.seats?"


def test_unknown_key_in_the_second_dataset_names_its_place() -> None:
    text = SMALL + '\n[[dataset]]\npath = "b.jsonl"\npurpos = "eval"\n'
    assert _error(text) == "a.toml: unknown key dataset.1.purpos: did you mean dataset.1.purpose?"


def test_unknown_key_below_a_dataset_names_the_way_there() -> None:
    text = SMALL + '[dataset.columns]\npromt = "question"\n'
    assert _error(text) == "a.toml: unknown key dataset.0.columns.promt: did you mean dataset.0.columns.prompt?"


def test_all_unknown_keys_are_named_at_once() -> None:
    text = "stalenes_max = 2\n" + SMALL + '[dataset.columns]\npromt = "question"\n[engines]\nseat = 3\n'
    assert _error(text).splitlines() == [
        "a.toml: unknown key stalenes_max: did you mean staleness_max?",
        "a.toml: unknown key dataset.0.columns.promt: did you mean dataset.0.columns.prompt?",
        "a.toml: unknown key engines.seat: did you mean engines.seats?",
    ]


def test_unknown_key_that_is_near_nothing_lists_what_there_is() -> None:
    assert "unknown key zzz: known: broker, dataset, " in _error(SMALL, "zzz=1")


def test_tables_of_foreign_libraries_go_through_untouched() -> None:
    settings = _settings("vllm.block_size=16", "megatron.anything.deep=true", "kafka.linger_ms=5")
    assert settings.vllm == {"block_size": 16}
    assert settings.megatron == {"anything": {"deep": True}}
    assert settings.kafka == {"linger_ms": 5}


def test_wrong_type_names_file_and_key() -> None:
    assert _error(SMALL, "engines.seats=many").startswith("a.toml: engines.seats: ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=three", 'steps: "three" is no whole number: write steps = 3'),
        ("steps=2.5", "steps: 2.5 is no whole number: write steps = 3"),
        ("engines.seats=many", 'engines.seats: "many" is no whole number: write seats = 32'),
        ("reward.timeout_s=10s", 'reward.timeout_s: "10s" is no number: write timeout_s = 10.0'),
        ("prefect.enabled=maybe", 'prefect.enabled: "maybe" is neither true nor false: write enabled = true'),
        ("engines.kind=vlm", 'engines.kind: "vlm" is none of vllm, paced: write kind = "vllm"'),
        ("name=5", 'name: 5 is no text: write name = "5"'),
        ("model=[1]", 'model: [1] is no text: write model = "..."'),
        ("dataset={path='a'}", "dataset: a table is no list of tables: write [[dataset]] above the keys of each"),
        ("dataset=[3]", "dataset.0: 3 is no table: write [[dataset]] above its keys"),
        ("dataset=[{path='a', columns=3}]", "dataset.0.columns: 3 is no table: write [dataset.columns] above its keys"),
        ("engines=3", "engines: 3 is no table: write [engines] above its keys"),
        ("vllm=3", "vllm: 3 is no table: write [vllm] above its keys"),
    ],
)
def test_a_value_of_the_wrong_kind_is_answered_with_what_to_write(override: str, said: str) -> None:
    assert _error(SMALL, override) == f"a.toml: {said}"


def test_several_faults_are_named_at_once() -> None:
    assert len(_error(SMALL, "engines.seats=0", "seed=-1").splitlines()) == 2


def test_override_takes_toml_values_and_bare_words() -> None:
    settings = _settings("name=abc", "engines.count=3", "prefect.enabled=false", "sampling={temperature=0.5}")
    assert (settings.name, settings.engines.count, settings.prefect.enabled) == ("abc", 3, False)
    assert settings.sampling.temperature == 0.5


def test_override_without_a_value_or_below_no_table_says_what_to_write() -> None:
    assert _error(SMALL, "steps") == "--set steps: write key=value, e.g. --set engines.count=3"
    assert _error(SMALL, "steps.a=1") == "--set steps.a=1: steps is no table"


def test_steps_and_epochs_contradict_each_other() -> None:
    """H06."""
    assert "set exactly one of `steps` and `epochs`" in _error(SMALL, "epochs=2")
    assert "set exactly one of `steps` and `epochs`" in _error(SMALL, "steps=0")
    assert _settings("steps=0", "epochs=2").epochs == 2


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_one_sample_per_group_has_nothing_to_compare_with(advantage: str) -> None:
    assert "use 2 or more" in _error(SMALL, "group_size=1", f"training.advantage={advantage}")


def test_one_sample_per_group_will_do_where_it_is_compared_with_the_whole_step() -> None:
    alone = ("group_size=1", "training.advantage=reinforce_pp")
    assert _settings(*alone).group_size == 1
    assert "would void every group" in _error(SMALL, *alone, "scheduling.dynamic_sampling=true")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["clip_dual=0.9"], "clip_dual is a ratio: use more than 1"),
        (["clip_dual=3", "ratio=cispo"], "clip_dual does nothing with ratio = cispo"),
        (["tis_cap=0.5", "decoupled=true"], "tis_cap below 1"),
        (["tis_cap=2"], "tis_cap needs decoupled = true"),
        (["tis_mask=true"], "tis_mask needs a tis_cap"),
        (["kl_refresh_steps=5"], "kl_refresh_steps needs a kl_coef"),
        (["kl_version=5"], "kl_version needs a kl_coef"),
        (["kl_version=5", "kl_coef=0.1", "kl_refresh_steps=5"], "use one of the two"),
        (["kl_version=3", "kl_coef=0.1"], "training.kl_version = 3 is never a reference"),
        (["schedule=linear"], "training.schedule = linear falls until the last step: set `steps`"),
        (["warmup_steps=3"], "training.warmup_steps = 3 leaves none of 3 steps"),
        (["overlong_penalty_tokens=300"], "above sampling.max_new_tokens = 256"),
        (["overlong_mask=true"], "every response is cut at its limit"),
        (["loss_level=tokens"], "training.loss_level"),
        (["ratio=gspo"], "training.ratio"),
    ],
)
def test_objectives_and_schedules_that_contradict_themselves_are_refused(overrides: list[str], said: str) -> None:
    others = {
        "schedule=linear": ["steps=0", "epochs=1"],
        "warmup_steps=3": ["steps=3"],
        "kl_version=3": ["steps=3"],
        "overlong_mask=true": ["sampling.ignore_eos=true"],
    }
    assert said in _error(SMALL, *(f"training.{one}" for one in overrides), *others.get(overrides[0], []))


def test_synchronous_run_may_open_one_whole_batch() -> None:
    """B05: K = 0 and B = 4 gives 4 live groups, not 0."""
    by_mode, by_k = _settings("mode=sync", "groups_per_batch=4"), _settings("staleness_max=0", "groups_per_batch=4")
    assert (by_mode.lag_max, by_mode.live_max) == (0, 4)
    assert (by_k.lag_max, by_k.live_max) == (0, 4)


def test_each_mode_has_its_lag_and_its_live_groups() -> None:
    said = {}
    for mode in ("sync", "one_step", "partial", "oversample", "dora"):
        settings = _settings(f"mode={mode}", "groups_per_batch=4", "staleness_max=3", "scheduling.live_factor=3.0")
        said[mode] = (settings.lag_max, settings.live_max, settings.mixes_versions)
    assert said == {
        "sync": (0, 4, False),
        "one_step": (1, 12, False),
        "partial": (3, 12, True),
        "oversample": (0, 6, False),
        "dora": (3, 12, False),
    }


def test_whoever_mixes_versions_in_a_trajectory_is_told_so() -> None:
    assert [note for note in _settings("mode=partial").notes() if "tokens of several versions" in note]
    assert _settings("mode=dora").notes() == []


def test_old_versions_are_filled_in_mode_dora_only() -> None:
    assert 'scheduling.legacy_fill needs mode = "dora"' in _error(SMALL, "mode=sync", "scheduling.legacy_fill=true")
    assert "oversample_factor" in _error(SMALL, "scheduling.oversample_factor=0.9")


def test_groups_open_under_every_so_many_th_version_in_mode_dora_and_while_they_can_be_trained() -> None:
    assert _settings("staleness_max=2", "scheduling.open_every=2").scheduling.open_every == 2
    assert "at most staleness_max" in _error(SMALL, "staleness_max=2", "scheduling.open_every=3")
    assert 'scheduling.open_every needs mode = "dora"' in _error(SMALL, "mode=partial", "scheduling.open_every=2")
    assert "scheduling.open_every" in _error(SMALL, "scheduling.open_every=0")


def test_resumed_run_computes_its_capacity_from_batches_and_not_from_versions() -> None:
    """B01: B = 64 gives 192 live groups at live_factor 3 and 128 at the default 2, whatever the version."""
    assert _settings("groups_per_batch=64", "scheduling.live_factor=3.0").live_max == 192
    assert _settings("groups_per_batch=64").live_max == 128


def test_live_factor_that_can_never_fill_a_batch_is_refused() -> None:
    assert "can never fill a batch" in _error(SMALL, "scheduling.live_factor=0.9")
    assert "nothing could ever open" in _error(SMALL, "scheduling.live_factor=0.1", "groups_per_batch=2")


def test_fewer_seats_than_a_group_needs_is_refused() -> None:
    said = _error(SMALL, "engines.count=2", "engines.seats=3")
    assert "all engines together have 6 seats, a group needs 8" in said
    assert _settings("engines.count=2", "engines.seats=4").engines.seats == 4


def test_truncated_sampling_is_refused_where_no_engine_knows_the_kept_mass() -> None:
    """D02."""
    for override in ("sampling.top_p=0.8", "sampling.top_k=10"):
        assert _settings(override).sampling.truncates
        assert "paced engines draw without a model" in _error(SMALL, override, "engines.kind=paced")
    assert not _settings().sampling.truncates


def test_dataset_needs_exactly_one_source() -> None:
    text = 'model = "m"\nsteps = 1\n[[dataset]]\n'
    assert "set exactly one of `path` and `task`" in _error(text)
    assert "set exactly one of `path` and `task`" in _error(text + 'path = "a"\ntask = "reasoning_gym:gcd"\nrows = 3\n')
    assert "`task` needs `rows`" in _error(text + 'task = "reasoning_gym:gcd"\n')


def test_nothing_to_train_on_and_nothing_to_evaluate_on_are_refused() -> None:
    assert 'no [[dataset]] with purpose = "train"' in _error(SMALL + 'purpose = "eval"\n')
    assert "evaluation.samples is set" in _error(SMALL, "evaluation.samples=1")


def test_run_name_that_kafka_would_not_take_is_refused() -> None:
    assert "name: use 1 to 80 letters" in _error(SMALL, "name='a b'")


def test_more_than_one_update_per_step_is_said_to_multiply_the_lag() -> None:
    """B08: K = 2 and 4 updates: the oldest token is 11 updates old at the last of them."""
    assert _settings().notes() == []
    (note,) = _settings("training.updates_per_step=4").notes()
    assert "up to 11 optimizer updates old" in note
    assert "bounded by 2 versions" in note


def test_settings_that_were_read_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        _settings().steps = 3  # type: ignore[misc]


def test_table_where_an_array_of_tables_belongs_names_the_key() -> None:
    assert _error('model = "m"\nsteps = 1\n[dataset]\npath = "a"\n').startswith("a.toml: dataset: ")
    assert _error(SMALL, "dataset.0.path=b") == "--set dataset.0.path=b: dataset.0 is no table"


def test_two_datasets_of_one_name_are_told_apart_and_train_and_eval_share_it() -> None:
    text = SMALL + '[[dataset]]\npath = "other/rows.jsonl"\n[[dataset]]\npath = "rows.jsonl"\npurpose = "eval"\n'
    assert parse_settings(text, "a.toml").dataset_names() == ["rows", "rows-1", "rows"]


def test_every_key_of_our_own_has_a_default_but_the_model() -> None:
    said = _error("").splitlines()
    assert [line for line in said if "is missing" in line] == ["a.toml: model: is missing: write model = ..."]
