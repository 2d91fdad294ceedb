"""Run folders: what is in them and which one a person means. Light imports: `dora status` must answer at once."""

import difflib
from pathlib import Path

from workers.runtime.errors import BadInput

RESOLVED = "config.toml"
STATUS = "status.json"
SUMMARY = "summary.json"
FLOW_RUN = "flow_run.json"
"""Which flow run of Prefect works, or worked, on it."""
NAMES_SHOWN_MAX = 5


def find_run(run: str, runs_dir: Path) -> Path:
    """The folder of a run: its path, or its name under `runs_dir`. BadInput names the nearest ones."""
    places = (Path(run), runs_dir / run)
    for folder in places:
        if (folder / RESOLVED).is_file():
            return folder.resolve()
    parent = (Path(run).parent if len(Path(run).parts) > 1 else runs_dir).resolve()
    looked = " or ".join(dict.fromkeys(map(str, places)))
    raise BadInput(f"no run {run!r} (no {RESOLVED} in {looked}); {_nearest(Path(run).name, parent)}")


def _nearest(name: str, parent: Path) -> str:
    there = sorted(parent.glob(f"*/{RESOLVED}"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [file.parent.name for file in there]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)} in {parent}?"
    return f"the newest in {parent}: {', '.join(names[:NAMES_SHOWN_MAX]) or 'no run at all'}"
