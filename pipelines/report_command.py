"""`dora report` for people and programs: what it prints, and the page that it writes."""

import json
from pathlib import Path

from pipelines import archived, case_study, report
from pipelines.config_file import read_resolved
from pipelines.report_page import page


def show(run_dir: Path, html: Path | None, *, as_json: bool) -> None:
    """Print what the archive tells, and write the page if `html` names one. BadInput: of damage at the end."""
    damage: list[str] = []
    settings = read_resolved(run_dir)
    if html is not None:
        page.write(settings, run_dir, html, damage)
    made = report.summarise(settings, run_dir, damage)
    study = case_study.case_study(run_dir, damage)
    if as_json:
        print(json.dumps({"summary": made.model_dump(mode="json"), "case_study": study}))
    else:
        print(f"{report.as_text(made)}\n{case_study.as_text(study)}")
    archived.complain(damage)
