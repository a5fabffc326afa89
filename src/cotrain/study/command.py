"""The command `cotrain study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotrain.errors import ConfigError
from cotrain.interrupts import interrupts
from cotrain.progress import display


def study(
    file: Annotated[Path, typer.Argument(help="A study's TOML file; see docs/studies.md.")],
    only: Annotated[list[str] | None, typer.Option(help="Run this arm; repeat for several. Default: all.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="Run this seed; repeat for several. Default: all.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Run nothing; make the tables and the figure.")] = False,
) -> None:
    """Train arms x seeds under equal budgets and compare them: one table, one figure.

    What is finished is left, what was begun goes on. Ctrl-C: after the step in progress. Ends with code 1 if a run
    failed or was broken off; the others are made all the same.
    """
    from cotrain.study.plan import check, chosen_jobs, jobs_of, load_study
    from cotrain.study.results import check_fits
    from cotrain.study.running import Summary, begin, run_jobs

    if table and (only or seeds):
        raise ConfigError("--table", "it comes with --only or --seeds, but nothing is run", "Leave them out")
    plan = load_study(file)
    jobs = jobs_of(plan)
    wanted = chosen_jobs(plan, jobs, only or (), seeds or ())
    for job in jobs:
        check_fits(job)
    summary = Summary()
    if not table:
        check(plan, jobs)
        begin(plan)
        with display() as shown, interrupts() as stop:
            summary = run_jobs(wanted, stop, shown.say, shown.update)
    from cotrain.study.figure import write_figure
    from cotrain.study.pages import write_tables
    from cotrain.study.table import finished, tables_of

    runs = finished(jobs)
    tables = tables_of(plan, jobs, runs)
    print(write_tables(tables, plan.folder))
    files = ["table.md", "table.json", *(write_figure(tables, runs, plan.folder) if runs else ())]
    print(f"{plan.folder}: {', '.join(files)}")
    if summary.failed or summary.is_broken_off:
        raise typer.Exit(1)
