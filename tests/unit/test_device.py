"""`dtype = "auto"` is bfloat16 only where that is fast."""

from pathlib import Path

import pytest

from pipelines.config_file import read_settings
from pipelines.device import best_dtype, cpu_flags, gpus_of, visible_gpus
from pipelines.validate import with_dtype
from tests.unit.pipeline_parts import a_config


@pytest.mark.parametrize(
    ("flags", "best"),
    [("fpu avx2 fma", "float32"), ("avx2 avx512f avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16"), ("", "float32")],
)
def test_a_cpu_without_instructions_for_bfloat16_computes_in_float32(tmp_path: Path, flags: str, best: str) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nflags\t\t: {flags}\n\nprocessor : 1\nflags : other\n")
    assert best_dtype(info, tmp_path / "no-gpu") == best


def test_a_gpu_is_enough(tmp_path: Path) -> None:
    (tmp_path / "gpu").touch()
    assert best_dtype(tmp_path / "nothing", tmp_path / "gpu") == "bfloat16"
    assert cpu_flags(tmp_path / "nothing") == set()


def test_what_a_person_sets_stands(tmp_path: Path) -> None:
    assert with_dtype(read_settings(a_config(tmp_path, dtype="bfloat16"))).dtype == "bfloat16"
    assert with_dtype(read_settings(a_config(tmp_path))).dtype == best_dtype()


def test_engines_take_turns_on_all_gpus_but_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight = [str(number) for number in range(8)]
    assert gpus_of("trainer", 0, eight) == ["7"]
    assert [gpus_of("rollout", number, eight) for number in range(8)] == [[str(n)] for n in (0, 1, 2, 3, 4, 5, 6, 0)]
    assert [gpus_of("rollout", n, eight, 3) for n in range(3)] == [["0", "1", "2"], ["3", "4", "5"], ["0", "1", "2"]]
    assert gpus_of("trainer", 0, eight, 1, 4) == ["4", "5", "6", "7"]
    assert [gpus_of("rollout", n, eight, 2, 4) for n in range(3)] == [["0", "1"], ["2", "3"], ["0", "1"]]
    assert gpus_of("reward", 0, eight) == gpus_of("rollout", 0, eight, 8) == gpus_of("rollout", 1, ["0"]) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path / "none") == []
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    assert visible_gpus(tmp_path / "gpus") == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert visible_gpus(tmp_path / "gpus") == ["GPU-a", "GPU-b"]
