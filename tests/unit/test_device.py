"""`dtype = "auto"` is bfloat16 only where that is fast."""

from pathlib import Path

import pytest

from pipelines.config_file import read_settings
from pipelines.device import best_dtype, cpu_flags
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
