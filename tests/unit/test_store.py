"""Versions on disk: whole or not there, unchanging, checked when opened."""

import json
import struct
from pathlib import Path

import pytest

from schemas.messages import WeightsRecord
from workers.runtime.errors import WeightsUnavailable
from workers.transport.weights.manifest import RawTensor, fingerprint
from workers.transport.weights.store import Published, Store, read_tensors

PROBE = [-1.5] * 63


def tensors(first: float = 1.0) -> list[RawTensor]:
    return [
        RawTensor("model.b", "F32", (2,), struct.pack("<2f", first, 2.0)),
        RawTensor("model.a", "BF16", (3,), bytes(6)),
    ]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "torch_dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"not copied")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "weights")


def published(store: Store, model_folder: Path, version: int = 3, first: float = 1.0) -> Published:
    return store.publish(version, tensors(first), model_folder=model_folder, probe_logprobs=PROBE, dtype="float32")


def announced(made: Published, version: int = 3, **changes: str) -> WeightsRecord:
    fields = {"location": made.location, "manifest_sha256": made.manifest_sha256, "fingerprint": made.fingerprint}
    return WeightsRecord(
        run="r", version=version, step=version - 1, groups=(), trajectories=0, created_at=0, **{**fields, **changes}
    )


def folder_of(made: Published) -> Path:
    return Path(made.location.removeprefix("file://"))


def test_a_published_version_opens_and_has_the_tensors_given(store: Store, model_folder: Path) -> None:
    made = published(store, model_folder)
    folder, manifest = store.open(announced(made))
    assert [(one.name, one.dtype, one.shape, bytes(one.data)) for one in read_tensors(folder)] == [
        (one.name, one.dtype, one.shape, one.data) for one in sorted(tensors(), key=lambda one: one.name)
    ]
    assert fingerprint(read_tensors(folder)) == made.fingerprint == manifest.fingerprint
    assert manifest.probe_logprobs == tuple(PROBE)
    assert sorted(manifest.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((folder / "config.json").read_text()) == {"vocab_size": 512, "dtype": "float32"}
    assert store.versions() == [3]


def test_the_file_is_what_the_safetensors_library_reads(store: Store, model_folder: Path) -> None:
    from safetensors import safe_open

    made = published(store, model_folder)
    with safe_open(folder_of(made) / "model.safetensors", framework="np") as file:
        assert sorted(file.keys()) == ["model.a", "model.b"]
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("model.b").tolist() == [1.0, 2.0]


def test_publishing_the_same_tensors_again_writes_nothing(store: Store, model_folder: Path) -> None:
    made = published(store, model_folder)
    before = {path: path.stat().st_mtime_ns for path in folder_of(made).iterdir()}
    assert published(store, model_folder) == made
    assert {path: path.stat().st_mtime_ns for path in folder_of(made).iterdir()} == before


def test_publishing_other_tensors_keeps_the_announced_files_and_says_so(store: Store, model_folder: Path) -> None:
    made = published(store, model_folder)
    again = published(store, model_folder, first=5.0)
    assert again.differs
    assert not made.differs
    assert (again.location, again.manifest_sha256, again.fingerprint) == (
        made.location,
        made.manifest_sha256,
        made.fingerprint,
    )
    assert again.offered == fingerprint(tensors(5.0)) != made.fingerprint
    store.open(announced(made))


def test_a_crash_while_writing_leaves_no_version_and_the_next_try_succeeds(store: Store, model_folder: Path) -> None:
    half = model_folder.parent / "weights" / ".v000003.tmp"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    (half / "stray.json").write_text("{}")
    assert store.versions() == []
    made = published(store, model_folder)
    assert not half.exists()
    assert "stray.json" not in {path.name for path in folder_of(made).iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_changed_byte_makes_a_version_unavailable(store: Store, model_folder: Path, name: str) -> None:
    made = published(store, model_folder)
    path = folder_of(made) / name
    value = bytearray(path.read_bytes())
    value[-2] ^= 1
    path.write_bytes(value)
    with pytest.raises(WeightsUnavailable, match=name):
        store.open(announced(made))


def test_a_manifest_that_was_written_anew_is_not_the_announced_one(store: Store, model_folder: Path) -> None:
    made = published(store, model_folder)
    path = folder_of(made) / "manifest.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(WeightsUnavailable, match="announced"):
        store.open(announced(made))


def test_a_missing_file_or_folder_makes_a_version_unavailable(store: Store, model_folder: Path) -> None:
    made = published(store, model_folder)
    (folder_of(made) / "tokenizer.json").unlink()
    with pytest.raises(WeightsUnavailable, match=r"tokenizer\.json"):
        store.open(announced(made))
    store.delete(3)
    with pytest.raises(WeightsUnavailable, match=r"manifest\.json"):
        store.open(announced(made))


def test_an_announcement_of_another_version_or_place_is_refused(store: Store, model_folder: Path) -> None:
    made = published(store, model_folder)
    with pytest.raises(WeightsUnavailable):
        store.open(announced(made, version=4))
    with pytest.raises(WeightsUnavailable):
        store.open(announced(made, fingerprint="0" * 64))
    with pytest.raises(WeightsUnavailable, match="s3"):
        store.open(announced(made, location="s3://bucket/v000003"))


def test_a_deleted_version_is_gone_and_can_be_deleted_again(store: Store, model_folder: Path) -> None:
    published(store, model_folder, version=2)
    published(store, model_folder, version=10)
    assert store.versions() == [2, 10]
    store.delete(2)
    store.delete(2)
    assert store.versions() == [10]


def test_a_folder_with_a_space_in_its_name_opens(tmp_path: Path, model_folder: Path) -> None:
    store = Store(tmp_path / "my weights")
    store.open(announced(published(store, model_folder)))


def test_a_file_cut_short_is_unavailable_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(WeightsUnavailable):
        list(read_tensors(tmp_path))
