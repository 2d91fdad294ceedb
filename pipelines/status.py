"""`dora status`: where a run stands, from its folder alone (the supervisor renews `status.json` every few seconds)."""

import json
from pathlib import Path
from typing import Any

from pipelines import children
from pipelines.supervise import STATUS


def status_of(run_dir: Path) -> dict[str, Any]:
    """The last snapshot, whether the run is live, its addresses; `summary` once there is one."""
    said: dict[str, Any] = {"folder": str(run_dir), "live": children.is_live(run_dir)}
    lock = children.read_lock(run_dir) or {}
    said |= {name: lock[name] for name in ("broker", "prefect") if name in lock}
    for name, file in (("now", STATUS), ("summary", "summary.json")):
        path = run_dir / file
        if path.is_file():
            said[name] = json.loads(path.read_text())
    return said


def as_text(said: dict[str, Any]) -> str:
    """For people."""
    now = said.get("now")
    outcome = (now or {}).get("outcome")
    state = "running" if said["live"] else (outcome or {}).get("kind", "not running (it ended without a word)")
    lines = [f"{said['folder']}: {state}"]
    if outcome and outcome["reason"]:
        lines.append(f"  {outcome['reason']}")
    if now:
        engines = [f"{number}: {'-' if v is None else f'v{v}'}" for number, v in now["engines"].items()]
        lag = [f"{lag}: {count}" for lag, count in now["lag"].items()]
        lines += [
            f"  step            {now['step']}" + (f" of {now['steps']}" if now["steps"] else ""),
            f"  newest version  {'-' if now['version'] is None else now['version']}",
            f"  engines host    {', '.join(engines) or 'none yet'}; {now['running']} requests running",
            f"  groups          {now['live_groups']} live, {now['queued_groups']} complete, {now['voided']} voided",
            f"  lag             {', '.join(lag) or '-'}",
            f"  reward          {'-' if now['reward'] is None else now['reward']}",
            f"  rate            {now['tokens_per_second']} tokens/s; blocked by the oldest "
            f"{now['blocked_by_oldest_s']:.1f} s",
            f"  faults          {now['engines_lost']} engines lost, {now['restarts']} restarts",
        ]
    lines += [f"  {name:<15} {said[name]}" for name in ("broker", "prefect") if name in said]
    return "\n".join(lines)
