"""The reference of settings is what the models say."""

from pipelines import settings_page
from schemas.settings import PASSED_THROUGH, Settings
from tests.unit.test_house import _keys


def test_docs_settings_is_as_the_models_say() -> None:
    fresh = "python -m pipelines.settings_page"
    assert settings_page.FILE.read_text() == settings_page.page(), f"docs/SETTINGS.md is stale: {fresh} writes it anew"
    assert fresh in settings_page.page()


def test_every_key_is_in_it_with_its_meaning() -> None:
    lines = settings_page.page().splitlines()
    for key in set(_keys(Settings)) - set(PASSED_THROUGH):
        rows = [line for line in lines if line.startswith(f"| `{key}` |")]
        assert len(rows) == 1, key
        assert not rows[0].endswith("|  |"), f"{key} has no meaning"
