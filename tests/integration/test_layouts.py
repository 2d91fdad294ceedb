"""Tensor, pipeline and data parallel, and what goes with them, against one process: real ranks over gloo."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.models import write_tiny
from schemas.settings import Settings
from tests.integration.helpers_megatron import samples_of, save
from tests.integration.layouts import OVERLAP, PIPELINE, SHARED, TENSOR, Case, Room, plain
from workers.trainer.learners.ranked_learner import megatron_learner_of
from workers.transport.weights.manifest import fingerprint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
STEPS = 20
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
CASES = {
    "tp2": Case(1, {TENSOR: 2}),
    "pp2": Case(1, {PIPELINE: 2}),
    "pp4": Case(1, {PIPELINE: 4}),
    "dp2": Case(2),
    "dp4": Case(4),
    "dp2-overlap": Case(2, {"overlap_grad_reduce": True}),
    "dp2-shared": Case(2, SHARED),
    "dp2-shared-overlap": Case(2, OVERLAP),
    "tp2-pp2": Case(1, {TENSOR: 2, PIPELINE: 2}),
    "tp2-dp2-shared-overlap": Case(2, {TENSOR: 2} | OVERLAP),
    "pp2-dp2-shared": Case(2, {PIPELINE: 2} | SHARED),
    "recompute": Case(1, FULL),
    "tp2-dp2-recompute": Case(2, {TENSOR: 2} | SELECTIVE),
    "pp2-recompute": Case(1, {PIPELINE: 2} | FULL),
}
ONE = Case()
EVERY_TERM: dict[str, Any] = {"entropy_coef": 0.01, "kl_coef": 0.1}
Opens = Callable[[int], Room]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, four heads in two groups, norms of queries and keys, a tied head."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder, "qwen3", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    return folder


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opens]:
    """A room with so many ranks, opened once."""
    rooms: dict[int, Room] = {}

    def opens(ranks: int) -> Room:
        if ranks not in rooms:
            rooms[ranks] = Room(ranks, tmp_path_factory.mktemp(f"room-{ranks}"))
        return rooms[ranks]

    yield opens
    for one in rooms.values():
        one.close()


def steps(count: int, first: int = 0) -> list[tuple[str, Any]]:
    return [("train", [plain(samples_of(first + seed)), first + seed]) for seed in range(count)]


def trained(room: Room, settings: Settings, count: int) -> dict[str, Any]:
    """Exported before; log-probs before; figures of each step; weights after."""
    file = room.folder / "weights.safetensors"
    calls = [("export", str(file)), ("logprobs", plain(samples_of(77))), *steps(count), ("export", str(file))]
    start, logprobs, *figures, end = room.run(settings, *calls)
    return {"start": start, "logprobs": logprobs, "figures": figures, "end": end, "weights": _weights(file)}


def _weights(file: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(file)


def largest_difference(one: Any, other: Any) -> float:
    assert sorted(one) == sorted(other)
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def assert_close(found: dict[str, Any], one: dict[str, Any], *, weights: float, figures: float = 1e-5) -> None:
    """The weights that were read come out bit for bit; log-probs, loss and gradient norm are those of one process."""
    assert found["start"] == one["start"]
    for values, expected in zip(found["logprobs"], one["logprobs"], strict=True):
        assert values == pytest.approx(expected, abs=1e-5)
    for said, expected in zip(found["figures"], one["figures"], strict=True):
        assert set(said) == set(expected)
        assert said["loss"] == pytest.approx(expected["loss"], rel=figures, abs=figures)
        assert said["grad_norm"] == pytest.approx(expected["grad_norm"], rel=figures)
        assert (said["tokens"], said["nonfinite"]) == (expected["tokens"], expected["nonfinite"])
    assert largest_difference(found["weights"], one["weights"]) < weights


def test_two_ranks_train_as_one_process_does(room: Opens, model: Path) -> None:
    """Tensor, pipeline and data parallel, three steps of each."""
    here = room(2)
    one = trained(here, ONE.settings(model, **EVERY_TERM), 3)
    for name in ("tp2", "pp2", "dp2"):
        assert_close(trained(here, CASES[name].settings(model, **EVERY_TERM), 3), one, weights=5e-4)


def test_a_learner_of_two_processes_is_used_as_one(model: Path, tmp_path: Path) -> None:
    """What the trainer's service does with it, in this very process."""
    settings = CASES["tp2"].settings(model)
    alone = megatron_learner_of(ONE.settings(model), model)
    read, expected = fingerprint(alone.export()), alone.train(samples_of(1), 0)
    learner = megatron_learner_of(settings, model)
    assert fingerprint(learner.export()) == read
    said = learner.train(samples_of(1), 0)
    assert said["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert said["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    save(learner, tmp_path / "saved")
    after = learner.train(samples_of(2), 1), fingerprint(learner.export()), learner.probe([1, 2, 3])
    learner.close()
    again = megatron_learner_of(settings, model)
    again.restore(tmp_path / "saved")
    assert (again.train(samples_of(2), 1), fingerprint(again.export()), again.probe([1, 2, 3])) == after
    again.close()


# --- everything, long -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(room: Opens, model: Path) -> Callable[..., dict[str, Any]]:
    """Training in one process, once for each choice."""
    found: dict[str, dict[str, Any]] = {}

    def of(case: Case, **training: Any) -> dict[str, Any]:
        key = str((case.megatron, training))
        if key not in found:
            found[key] = trained(room(4), case.settings(model, **training), STEPS)
        return found[key]

    return of


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.megatron.get(next(iter(SHARED)))])
def test_twenty_steps_of_sgd_are_those_of_one_process(
    name: str, room: Opens, model: Path, alone: Callable[..., dict[str, Any]]
) -> None:
    sgd, training = {"optimizer": "sgd"}, {"learning_rate": 0.05} | EVERY_TERM
    case = Case(CASES[name].data, CASES[name].megatron | sgd)
    found = trained(room(4), case.settings(model, **training), STEPS)
    one = alone(Case(1, sgd), **training)
    assert found["start"] != found["end"]
    assert_close(found, one, weights=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", list(CASES))
def test_twenty_steps_of_adam_are_those_of_one_process(
    name: str, room: Opens, model: Path, alone: Callable[..., dict[str, Any]]
) -> None:
    found = trained(room(4), CASES[name].settings(model, **EVERY_TERM), STEPS)
    assert_close(found, alone(ONE, **EVERY_TERM), weights=5e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", list(CASES))
def test_bfloat16_with_float32_masters_trains_in_every_layout(
    name: str, room: Opens, model: Path, alone: Callable[..., dict[str, Any]]
) -> None:
    """Rounding differs with the order of sums, and with it which tokens are clipped: a step's gradient norm is up to a
    quarter off. So training is as near to that in float32 as one process' is."""
    found = trained(room(4), CASES[name].settings(model, dtype="bfloat16", **EVERY_TERM), STEPS)
    one, exact = alone(ONE, dtype="bfloat16", **EVERY_TERM), alone(ONE, **EVERY_TERM)
    assert found["start"] == one["start"]
    assert [said["updates_skipped"] for said in found["figures"]] == [0.0] * STEPS
    for figure in ("loss", "grad_norm"):
        assert distance(found, exact, figure) < 1.5 * distance(one, exact, figure)
    assert largest_difference(found["weights"], one["weights"]) < 0.03


def distance(found: dict[str, Any], exact: dict[str, Any], figure: str) -> float:
    """Mean over the steps of the figure's difference, in the exact one's mean size."""
    pairs = [(one[figure], other[figure]) for one, other in zip(found["figures"], exact["figures"], strict=True)]
    return sum(abs(one - other) for one, other in pairs) / sum(abs(other) for _, other in pairs)


RESUMES = [
    ("tp2", "pp2"),
    ("pp2", "tp2"),
    ("dp2", "tp2"),
    ("tp2", "one"),
    ("one", "dp2"),
    ("tp2-pp2", "dp4"),
    ("dp2-shared", "one-shared"),
    ("dp2-shared-overlap", "tp2-shared"),
    ("pp2-dp2-shared", "dp2-shared"),
]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pair", RESUMES, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def test_training_goes_on_in_another_layout(
    pair: tuple[str, str], dtype: str, room: Opens, model: Path, tmp_path: Path
) -> None:
    before, after = pair
    cases = CASES | {"one": ONE, "one-shared": Case(1, SHARED), "tp2-shared": Case(1, {TENSOR: 2} | SHARED)}
    here, folder, file = room(4), tmp_path / "saved", str(tmp_path / "w.safetensors")
    folder.mkdir()
    saved = here.run(
        cases[before].settings(model, dtype=dtype),
        *steps(3),
        ("save", str(folder)),
        ("export", file),
        *steps(2, 3),
    )
    resumed = here.run(
        cases[after].settings(model, dtype=dtype), ("restore", str(folder)), ("export", file), *steps(2, 3)
    )
    assert resumed[0] is None
    assert resumed[1] == saved[4]
    bounds = {"float32": (1e-5, 1e-5), "bfloat16": (0.05, 0.1)}[dtype]
    for said, expected in zip(resumed[2:], saved[5:], strict=True):
        assert said["loss"] == pytest.approx(expected["loss"], rel=bounds[0], abs=bounds[0])
        assert said["grad_norm"] == pytest.approx(expected["grad_norm"], rel=bounds[1])


@pytest.mark.full
def test_a_renewed_reference_is_one_processs_in_every_layout_and_after_a_resume(
    room: Opens, model: Path, tmp_path: Path
) -> None:
    """Renewed at steps 2 and 4, saved between them and taken up in another layout."""
    training = {"kl_coef": 0.1, "kl_refresh_steps": 2}
    one = room(2).run(ONE.settings(model, **training), *steps(6))
    kept = room(2).run(ONE.settings(model, kl_coef=0.1), *steps(6))
    assert [abs(a["reference_kl"] - b["reference_kl"]) > 1e-3 for a, b in zip(one, kept, strict=True)] == [
        step >= 2 for step in range(6)
    ]
    turned = {"tp2": "pp2", "pp2": "dp2", "dp2": "tp2"}
    for name, other in turned.items():
        folder = tmp_path / name
        folder.mkdir()
        begun = room(2).run(CASES[name].settings(model, **training), *steps(3), ("save", str(folder)))
        after = room(2).run(CASES[other].settings(model, **training), ("restore", str(folder)), *steps(3, 3))
        for said, expected in zip([*begun[:3], *after[1:]], one, strict=True):
            for figure in ("loss", "grad_norm", "reference_kl"):
                assert said[figure] == pytest.approx(expected[figure], rel=1e-4, abs=1e-5), (name, figure)


@pytest.mark.full
@pytest.mark.parametrize(
    "training",
    [{}, {"loss_level": "sequence", "ratio": "sequence"}, {"decoupled": True, "tis_cap": 1.5} | EVERY_TERM],
    ids=lambda one: "-".join(one) or "grpo",
)
def test_the_objective_does_not_depend_on_copies_splits_or_order(
    training: dict[str, Any], room: Opens, model: Path
) -> None:
    """Lags differ between groups, so a copy may have tokens of a lag that the others have not."""
    from dataclasses import replace

    seed = 5
    samples = [replace(one, lag=one.group % 3) for one in samples_of(seed, groups=6)]
    groups = [[one for one in samples if one.group == number] for number in range(6)]
    random.Random(seed).shuffle(groups)
    shuffled = [one for group in groups for one in reversed(group)]
    here = room(4)
    (expected,) = here.run(ONE.settings(model, **training), ("train", [plain(samples), 0]))
    for copies in (1, 2, 4):
        for budget in (1, 60, 4096):
            for order in (samples, shuffled):
                packing = {"packing": budget != 60 or order is samples}
                settings = Case(copies).settings(model, **training | packing | {"micro_batch_tokens": budget})
                (said,) = here.run(settings, ("train", [plain(order), 0]))
                assert said == pytest.approx(expected, rel=1e-5, abs=1e-6), (copies, budget)
                assert said["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.mark.full
def test_a_loss_that_is_not_finite_is_left_out_on_every_rank(room: Opens, model: Path) -> None:
    """One sample of one copy: all skip, and go on alike."""
    from dataclasses import replace

    samples = samples_of(6)
    broken = [replace(samples[0], advantage=1e38), *samples[1:]]
    file = str(room(4).folder / "w.safetensors")
    for name in ("tp2-pp2", "tp2-dp2-shared-overlap", "dp4"):
        calls = [("train", [plain(samples), 0]), ("export", file), ("train", [plain(broken), 1]), ("export", file)]
        said = room(4).run(CASES[name].settings(model), *calls, ("train", [plain(samples), 2]), ("export", file))
        assert (said[0]["updates_skipped"], said[2]["updates_skipped"], said[4]["updates_skipped"]) == (0.0, 1.0, 0.0)
        assert said[1] == said[3] != said[5]


@pytest.mark.full
def test_more_copies_than_micro_batches_leave_some_with_nothing(room: Opens, model: Path) -> None:
    one = samples_of(8, groups=1, group_size=1)
    (expected,) = room(4).run(ONE.settings(model), ("train", [plain(one), 0]))
    for name in ("dp4", "dp2-shared-overlap", "pp2-dp2-shared"):
        (said,) = room(4).run(CASES[name].settings(model), ("train", [plain(one), 0]))
        assert said == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.full
def test_each_rank_holds_its_part_of_the_weights_only(room: Opens, model: Path) -> None:
    (whole,) = room(4).run(ONE.settings(model), ("bytes", None))
    for name, part in (("tp2", 0.55), ("pp2", 0.7), ("tp2-pp2", 0.4)):
        (held,) = room(4).run(CASES[name].settings(model), ("bytes", None))
        assert held < part * whole, name
