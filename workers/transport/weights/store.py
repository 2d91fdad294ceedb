"""Versions on disk: a folder `v000012` each, which is a Hugging Face folder (config, tokenizer, model.safetensors) and
has a manifest.

Rule 1: a version is there completely or not at all: written under a temporary name, fsynced, manifest last, renamed.
Rule 2: a version that is there never changes. Publishing it again writes nothing.
Rule 3: whoever opens a version checks the manifest against the announcement and every file against the manifest.
"""

import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from schemas.messages import WeightsRecord
from workers.runtime.errors import WeightsUnavailable
from workers.runtime.files import sync, write_synced
from workers.transport.weights.manifest import MANIFEST, Dtype, Manifest, RawTensor, fingerprint, probe_ids

WEIGHTS = "model.safetensors"
_FOLDER = re.compile(r"v(\d{6,})")
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_COPIED = (".json", ".txt", ".model", ".jinja")
_NOT_COPIED = (MANIFEST, f"{WEIGHTS}.index.json", "config.json")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Published:
    """What to announce. `differs`: the version was there already with other tensors; the files on disk stay, and
    location, hash and fingerprint are theirs. `offered` is the fingerprint of the tensors given to `publish`."""

    location: str
    manifest_sha256: str
    fingerprint: str
    offered: str
    differs: bool


class Store:
    """Versions under one folder of this machine (or of a file system that it mounts)."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def publish(
        self,
        version: int,
        tensors: Iterable[RawTensor],
        *,
        model_folder: Path,
        probe_logprobs: Sequence[float],
        dtype: Dtype,
    ) -> Published:
        """Write `version`, or find it written. The tensors of one version are held in memory together.

        Config and tokenizer files are copied from `model_folder`. `probe_logprobs` belong to `probe_ids(vocab_size)`
        of its config. OSError when the disk is full: then there is nothing to announce.
        """
        held = sorted(tensors, key=lambda one: one.name)
        offered = fingerprint(held)
        folder = self._folder(version)
        if folder.is_dir():
            manifest, digest = _read_manifest(folder)
            return Published(folder.as_uri(), digest, manifest.fingerprint, offered, manifest.fingerprint != offered)
        config = json.loads((model_folder / "config.json").read_text())
        unfinished = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _copy_side_files(model_folder, unfinished)
        write_synced(unfinished / "config.json", json.dumps(_with_dtype(config, dtype), indent=2).encode())
        _write_safetensors(unfinished / WEIGHTS, held)
        manifest = Manifest(
            version=version,
            dtype=dtype,
            files={path.name: _sha256(path) for path in sorted(unfinished.iterdir())},
            fingerprint=offered,
            probe_ids=probe_ids(config["vocab_size"]),
            probe_logprobs=tuple(probe_logprobs),
        )
        value = manifest.model_dump_json(indent=2).encode()
        write_synced(unfinished / MANIFEST, value)
        sync(unfinished)
        unfinished.rename(folder)
        sync(folder.parent)
        return Published(folder.as_uri(), hashlib.sha256(value).hexdigest(), offered, offered, differs=False)

    @staticmethod
    def open(record: WeightsRecord) -> tuple[Path, Manifest]:
        """The folder of an announced version, every file checked. WeightsUnavailable."""
        parts = urlsplit(record.location)
        if parts.scheme != "file":
            raise WeightsUnavailable(f"version {record.version}: cannot read {record.location}")
        folder = Path(unquote(parts.path))
        manifest, digest = _read_manifest(folder)
        if digest != record.manifest_sha256:
            raise WeightsUnavailable(f"{folder / MANIFEST}: sha256 is {digest}, announced {record.manifest_sha256}")
        if manifest.version != record.version or manifest.fingerprint != record.fingerprint:
            raise WeightsUnavailable(f"{folder / MANIFEST} is not of version {record.version} as announced")
        for name, expected in manifest.files.items():
            try:
                found = _sha256(folder / name)
            except OSError as error:
                raise WeightsUnavailable(f"{folder / name}: {error}") from error
            if found != expected:
                raise WeightsUnavailable(f"{folder / name}: sha256 is {found}, the manifest says {expected}")
        return folder, manifest

    def delete(self, version: int) -> None:
        """Remove a version; nothing happens if it is not there."""
        folder = self._folder(version)
        doomed = folder.with_name(f".{folder.name}.gone")
        if folder.is_dir():
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        if not self._root.is_dir():
            return []
        names = (_FOLDER.fullmatch(path.name) for path in self._root.iterdir() if path.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def _folder(self, version: int) -> Path:
        return self._root.resolve() / f"v{version:06d}"


def read_tensors(folder: Path) -> Iterator[RawTensor]:
    """The tensors of all safetensors files of a folder, mapped into memory, in ascending order of their names.

    WeightsUnavailable if there is none or one cannot be read.
    """
    tensors: dict[str, RawTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(_map_safetensors(path))
    if not tensors:
        raise WeightsUnavailable(f"{folder}: no tensors in it")
    for name in sorted(tensors):
        yield tensors[name]


def _map_safetensors(path: Path) -> dict[str, RawTensor]:
    """Format: u64 length of the header, header (JSON: name -> dtype, shape, data_offsets), data."""
    try:
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8:start]))
        header.pop("__metadata__", None)
        return {
            name: RawTensor(
                name, entry["dtype"], tuple(entry["shape"]), view[slice(*(start + at for at in entry["data_offsets"]))]
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsUnavailable(f"{path}: {type(error).__name__}: {error}") from error


def _write_safetensors(path: Path, tensors: Sequence[RawTensor]) -> None:
    """Widest items first, so that every tensor lies at a multiple of its item size."""
    ordered = sorted(tensors, key=lambda one: (-_ITEM_BYTES[one.dtype], one.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        size = memoryview(tensor.data).nbytes
        count = _ITEM_BYTES[tensor.dtype]
        for length in tensor.shape:
            count *= length
        assert size == count, f"{tensor.name}: {size} bytes for {tensor.dtype} {tensor.shape}"
        assert tensor.name not in header, f"{tensor.name} came twice"
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            file.write(tensor.data)
        file.flush()
        os.fsync(file.fileno())


def _copy_side_files(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name not in _NOT_COPIED:
            write_synced(target / path.name, path.read_bytes())


def _with_dtype(config: dict[str, object], dtype: str) -> dict[str, object]:
    """The config of a model whose tensors are of `dtype`, whatever the initial model's were."""
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}


def _read_manifest(folder: Path) -> tuple[Manifest, str]:
    try:
        value = (folder / MANIFEST).read_bytes()
        return Manifest.model_validate_json(value), hashlib.sha256(value).hexdigest()
    except (OSError, ValidationError) as error:
        raise WeightsUnavailable(f"{folder / MANIFEST}: {error}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
