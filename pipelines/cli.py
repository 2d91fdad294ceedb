"""The command `dora`. Thin: each command parses, calls one function of its own file, prints.

Exit codes: 0 done, 1 the run failed or a comparison differs, 2 bad input (said in one paragraph), 3 suspended,
130 cancelled. Imports are inside the commands: `dora --help` answers at once.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="dora",
    help="Asynchronous reinforcement learning for language models on a Kafka log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object (or one per line) instead of text.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")]
RunsDir = Annotated[
    Path, typer.Option(metavar="DIR", help="Where names of runs are looked up.", envvar="DORA_RUNS_DIR")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a setting.")]


@contextmanager
def _faults() -> Iterator[None]:
    """A person's mistake: exit 2, the world's fault: exit 1, said once on stderr; our own bugs keep a traceback."""
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        from pipelines import faults

        code = faults.exit_code_of(error)
        if code is None:
            raise
        print(faults.sentence(error), file=sys.stderr)
        raise typer.Exit(code) from None


def _stop_signals(wanted: bool) -> threading.Event:
    """Set when one comes, if they are wanted: what follows a run then ends in order."""
    stopping = threading.Event()
    if wanted:
        from workers.runtime.process import on_stop_signals

        on_stop_signals(lambda _: stopping.set())
    return stopping


@app.command(epilog="Example: dora run configs/quickstart.toml --set steps=5")
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file, e.g. configs/quickstart.toml.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that stopped.")] = False,
) -> None:
    """Train: check everything, start all processes, show progress, end with a summary."""
    with _faults():
        from pipelines.attach import run_config

        raise typer.Exit(run_config(config, overrides or [], resume))


@app.command(epilog="Example: dora up && dora run configs/quickstart.toml")
def up(as_json: AsJson = False) -> None:
    """Start the local broker, Prefect server and worker for longer work; twice says where they are."""
    with _faults():
        from pipelines.updown import up as start

        said = start()
        print(json.dumps(said) if as_json else "\n".join(f"{name:<8} {where}" for name, where in said.items()))


@app.command(epilog="Example: dora down --json")
def down(as_json: AsJson = False) -> None:
    """End what `dora up` started, and the runs that use it (they can be resumed)."""
    with _faults():
        from pipelines.updown import down as end

        ended = end()
        print(json.dumps({"ended": ended}) if as_json else f"ended: {', '.join(ended) or 'nothing was up'}")


@app.command(epilog="Example: dora init my_run.toml && dora validate my_run.toml")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new configuration file.")] = Path("my_run.toml"),
    as_json: AsJson = False,
) -> None:
    """Write a configuration with every key explained, and rows and a reward function to begin with."""
    with _faults():
        from pipelines.init import init as write

        written = [str(path) for path in write(file)]
        if as_json:
            print(json.dumps({"written": written}))
        else:
            print(f"wrote {', '.join(written)}; next: dora validate {file}")


@app.command(epilog="Example: dora validate configs/quickstart.toml; dora validate rows.parquet --prompt question")
def validate(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG|DATASET", help="A .toml configuration; or a dataset's file or folder.")
    ],
    *,
    overrides: Overrides = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Config: a model that is not here, and this machine, are not checked.")
    ] = False,
    prompt: Annotated[str, typer.Option(help="Dataset: column of the prompt.")] = "prompt",
    answer: Annotated[str, typer.Option(help="Dataset: column of the answer.")] = "answer",
    model: Annotated[str, typer.Option(metavar="FOLDER", help="Dataset: show rows as this model sees them.")] = "",
    as_json: AsJson = False,
) -> None:
    """Find every mistake in a configuration or a dataset without starting anything; show its first rows."""
    with _faults():
        from pipelines import validated
        from schemas.settings import Columns

        if target.suffix == ".toml":
            found = validated.configuration(target, overrides or [], offline=offline)
        else:
            found = validated.dataset(target, Columns(prompt=prompt, answer=answer), model)
        validated.show(found, as_json=as_json)


@app.command(epilog="Example: dora status quickstart-000 --watch")
def status(
    run: Run,
    watch: Annotated[bool, typer.Option("--watch", help="Go on every second until the run ends.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Where a run stands: window, versions, engines, queues, lag, rates, faults."""
    with _faults():
        from pipelines import status as view
        from pipelines.runs import find_run

        folder = find_run(run, runs_dir)
        if watch:
            view.watch(folder, as_json, threading.Event().wait)
        else:
            said = view.status_of(folder)
            print(view.as_json(said) if as_json else view.as_text(said))


@app.command(epilog="Example: dora report quickstart-000 --html report.html")
def report(
    run: Run,
    *,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """What a run did, from its archive: the summary, and whether stale groups were worse or only others."""
    with _faults():
        from pipelines import report_command
        from pipelines.runs import find_run

        report_command.show(find_run(run, runs_dir), html, as_json=as_json)


@app.command("eval", epilog="Example: dora eval quickstart-000 --follow")
def evaluate(
    run: Run,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends; keep and publish them.")] = False,
    every: Annotated[int | None, typer.Option(metavar="K", min=0, help="Held-out rows on each K-th version.")] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """A run's samples by version, task, difficulty and lag; with --follow also held-out rows on its versions."""
    with _faults():
        from pipelines import evaluate_command
        from pipelines.runs import find_run

        raise typer.Exit(evaluate_command.show(find_run(run, runs_dir), every=every, follow=follow, as_json=as_json))


@app.command(epilog='Example: dora tap quickstart-000 --sql "select version, avg(reward) from trajectories group by 1"')
def tap(
    run: Run,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Without one: which there are.")] = "",
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    since: Annotated[
        str,
        typer.Option(metavar="WHEN", help="10m, a time, a position that a tap printed, beginning, now."),
    ] = "beginning",
    where: Annotated[str, typer.Option(metavar="EXPR", help="SQL condition on the columns of a row.")] = "",
    sql: Annotated[str, typer.Option(metavar="SQL", help="A query; its tables are topics.")] = "",
    decode: Annotated[bool, typer.Option("--decode", help="Add what token ids say, as text.")] = False,
    arrow: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an Arrow IPC file.")] = None,
    state: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the position here; go on from it.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=0, help="Rows at most.")] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Read a stream of a run without touching it: live from the broker, later from the archive."""
    with _faults():
        from pipelines.runs import find_run
        from pipelines.tap import Ask
        from pipelines.tap_output import Output, show

        stopping = _stop_signals(follow)
        ask = Ask(follow=follow, since=since, where=where, decode=decode, limit=limit)
        show(find_run(run, runs_dir), topic, ask, Output(as_json, sql, arrow, state), stopping)
        raise typer.Exit(130 if stopping.is_set() else 0)


@app.command(epilog="Example: dora metrics quickstart-000 tensorboard board --follow")
def metrics(
    run: Run,
    sink: Annotated[str, typer.Argument(metavar="SINK", help="jsonl, tensorboard, wandb, mlflow.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the sink; it may hold several runs.")],
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Give a run's figures to a board of yours; started again it goes on where its output ends."""
    with _faults():
        from pipelines.metrics import send
        from pipelines.runs import find_run

        stopping = _stop_signals(follow)
        points = send(find_run(run, runs_dir), sink, folder, follow=follow, stopping=stopping)
        print(json.dumps({"points": points}) if as_json else f"{points} points more in {folder}")
        raise typer.Exit(130 if stopping.is_set() else 0)


@app.command(epilog="Example: dora export quickstart-000 my-model")
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    version: Annotated[int | None, typer.Option(help="Which version; without it the newest.", min=0)] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a version as a Hugging Face folder."""
    with _faults():
        from pipelines.export import export as copy
        from pipelines.runs import find_run

        record = copy(find_run(run, runs_dir), version, folder)
        said = {"folder": str(folder.resolve()), "version": record.version, "fingerprint": record.fingerprint}
        print(json.dumps(said) if as_json else f"version {record.version} is in {folder}")


@app.command(epilog="Example: dora replay quickstart-000 --step 12; dora replay quickstart-000 --decisions")
def replay(
    run: Run,
    *,
    step: Annotated[
        str | None, typer.Option(metavar="N|all", help="Train a step again, or all from the initial weights; compare.")
    ] = None,
    decisions: Annotated[bool, typer.Option("--decisions", help="Decide all again and compare.")] = False,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", metavar="a.b=c", help="Which decision a setting changes first.")
    ] = None,
    group: Annotated[int | None, typer.Option(metavar="G", min=0, help="The life of a group, with its text.")] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="--group: sample it again on its version's weights; compare.")
    ] = False,
    to: Annotated[
        str, typer.Option("--to", metavar="BROKER", help="Say the run's topics again there (host:port), to debug on.")
    ] = "",
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="--to: as which run; else RUN-again-000.")] = "",
    topics: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="--to: only this; again for more.")
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="WHEN", help="--to: from a time, 10m ago, or a position. With --step A-B: steps.")
    ] = "",
    until: Annotated[
        str, typer.Option(metavar="WHEN|EVENT", help="--to: up to there. --decisions: to an event; how things stood.")
    ] = "",
    speed: Annotated[
        float | None, typer.Option(metavar="X", help="--to: 1 = as it was in time; else as fast as possible.")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Play a run again: a training step, the decisions, a group; or its topics (--to). 1 if a comparison differs."""
    with _faults():
        from pipelines.replay_command import Ask, play
        from pipelines.replay_to import Wanted
        from pipelines.runs import find_run

        event = until if not to and (decisions or what_if) else ""
        wanted = Wanted(to, name, tuple(topics or ()), step, since, "" if event else until, speed)
        if not to and wanted != Wanted("", step=step):
            raise typer.BadParameter("--as, --topic, --since, --until, --speed go with --to BROKER")
        ask = Ask(step, decisions, tuple(what_if or ()), group, regenerate, wanted if to else None, event)
        raise typer.Exit(0 if play(find_run(run, runs_dir), ask, as_json=as_json) else 1)


@app.command(epilog="Example: dora doctor --json")
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: libraries, Java, memory, disk."""
    with _faults():
        from pipelines.doctor import show

        raise typer.Exit(0 if show(Path.cwd(), as_json=as_json) else 1)


@app.command(epilog="Example: dora simulate --preset paper-64; dora simulate my_run.toml --calibrate-from my_run-000")
def simulate(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file; or use --preset.")] = None,
    *,
    preset: Annotated[str, typer.Option(metavar="NAME", help="paper-64, paper-128, paper-4096.")] = "",
    modes: Annotated[str, typer.Option(metavar="A,B", help="Which modes to compare.")] = "",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="A setting, cost.NAME, work.NAME, engines_total.")
    ] = None,
    sweep: Annotated[str, typer.Option(metavar="KEY=A,B,C", help="One table row for each value.")] = "",
    calibrate_from: Annotated[str, typer.Option(metavar="RUN", help="Costs and lengths of a run's archive.")] = "",
    advise: Annotated[
        bool, typer.Option("--advise", help="Least staleness and live groups that cost nothing.")
    ] = False,
    rollout: Annotated[int | None, typer.Option(metavar="N", help="Engines for rollout; else the best.")] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Runs that a figure is the mean of.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Plan: the orchestrator's own decisions in virtual time on a cost model, modes side by side."""
    with _faults():
        from pipelines.runs import find_run
        from pipelines.simulate.ask import Ask
        from pipelines.simulate.command import simulate as think

        run_dir = find_run(calibrate_from, runs_dir) if calibrate_from else None
        asked = Ask(config, preset, modes, overrides or (), run_dir, seeds, sweep, rollout)
        think(asked, advice=advise, as_json=as_json, html=html)


@app.command(epilog="Example: dora bench tap --json")
def bench(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Without one: which there are.")] = "",
    as_json: AsJson = False,
    *,
    runs: Annotated[Path | None, typer.Option(metavar="DIR", help="learn: folder of its runs' folders.")] = None,
    modes: Annotated[str | None, typer.Option(metavar="A,B", help="learn: such as sync-k0,dora-k2.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="1,2,3", help="learn: seeds of each mode.")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="learn: of runs to be made; 0 = make none.")] = None,
) -> None:
    """Measure this machine: ratios within one run."""
    with _faults():
        from pipelines.bench import benchmarks as benches

        if not name:
            print("\n".join(f"{name:<8} {what}" for name, what in benches.NAMES.items()))
            return
        found = benches.measure(name, runs=runs, modes=modes, seeds=seeds, steps=steps)
        if as_json:
            print(json.dumps(found))
        else:
            print("\n".join(f"{key:<40} {value:,}" for key, value in found["figures"].items()))


@app.command(epilog="Example: dora worker rollout --run-dir runs/quickstart-000 --broker 127.0.0.1:9092 --number 1")
def worker(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="orchestrator, rollout, reward, trainer, archive, prompts")
    ],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="The run's folder.")],
    broker: Annotated[str, typer.Option("--broker", metavar="ADDRESS", help="host:port.", envvar="DORA_BROKER")],
    number: Annotated[int, typer.Option("--number", min=0, help="Which engine or scorer.")] = 0,
) -> None:
    """One process of a run (the supervisor starts these; by hand or on another host they work the same)."""
    with _faults():
        from pipelines.workers_entry import run_worker

        raise typer.Exit(run_worker(kind, run_dir, number, broker))


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
