"""The command `cotrain credit`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cotrain.progress import display

if TYPE_CHECKING:
    from cotrain.recompute.effects import Effect
    from cotrain.recompute.rescore import Outcome

_NAMES = {
    "shared_mean": "shared reward, mean",
    "shared_std": "shared reward, std",
    "credit_mean": "credit, mean",
    "credit_std": "credit, std",
    "advantage_size_mean": "|advantage|, mean",
    "advantage_size_std": "|advantage|, std",
    "num_advantages": "with an advantage",
}


def credit(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of rewards, advantage or align, loss.reduction, or agents.<name>.trainable.",
        ),
    ] = None,
    steps: Annotated[str, typer.Option(help="Such as 1-20 or 1,5,9. Default: all that are stored.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score a run's stored groups again under other settings, and show what would change.

    Credits, alignment, advantages and each agent's share of the gradient; no rollouts are made and no model is loaded.
    """
    began = time.perf_counter()
    from cotrain.recompute.rescore import recompute
    from cotrain.recompute.settings import make_plans, parse_steps
    from cotrain.runs import stored_steps

    before, after = make_plans(run, settings or ())
    chosen = parse_steps(steps, stored_steps(run))
    with display() as shown:
        outcome = recompute(run, before, after, chosen, shown.update)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(as_values(outcome, run, settings or (), seconds), indent=2))
        return
    for line in lines(outcome, run, settings or ()):
        print(line)
    console = Console()
    for name, effect in outcome.effects.items():
        console.print(table(name, effect))
        print(compared(effect))
    print(f"{seconds:.1f} s")


def as_values(outcome: Outcome, run: Path, settings: Sequence[str], seconds: float) -> dict[str, object]:
    """All that is known, as plain values."""
    agents = {name: {**asdict(effect), "difference": effect.difference} for name, effect in outcome.effects.items()}
    values = {k: v for k, v in asdict(outcome).items() if k != "effects"}
    values |= {"is_reproduced": outcome.num_differing == 0, "time_s": seconds}
    return {"run": str(run), "set": list(settings), **values, "agents": agents}


def lines(outcome: Outcome, run: Path, settings: Sequence[str]) -> list[str]:
    """What stands above the tables: what was scored, under which settings, and whether it comes out as it is stored."""
    from cotrain.recompute.settings import spans
    from cotrain.show import visible

    said = [
        f"{run}, steps {spans(outcome.steps) or 'none'}: {outcome.num_groups} groups, "
        f"{outcome.num_trajectories} trajectories",
        f"set: {', '.join(settings)}" if settings else "nothing is set: the run's own settings",
    ]
    if outcome.unscored:
        said.append(f"left out, as no trajectory has a reward: steps {spans(outcome.unscored)}")
    if outcome.num_differing:
        found = f"{outcome.num_differing} trajectories come out otherwise, such as {', '.join(outcome.differing)}"
        said += [
            f"the stored advantages cannot be reproduced: with the run's own settings {found};",
            "what scored them (the system, the metric, an estimator, cotrain) has changed since, so not all of the "
            "differences below are made by the settings",
        ]
    else:
        said.append("the stored advantages are reproduced exactly with the run's own settings")
    return [visible(line) for line in said]


def table(agent: str, effect: Effect) -> Table:
    """One agent's numbers: stored, recomputed, difference."""
    from cotrain.show import visible

    title = f"{agent} on {effect.model}: {effect.num_trajectories} trajectories"
    made = Table("", title=Text(visible(title)), title_justify="left")
    for column in ("stored", "recomputed", "difference"):
        made.add_column(column, justify="right")
    reasons = [key for key in effect.stored if key.startswith("dropped/")]
    names = {**_NAMES, "gradient_share": f"share of {effect.model}'s gradient"}
    for key in [*_NAMES, *reasons, "gradient_share"]:
        name = names.get(key) or f"dropped: {key.removeprefix('dropped/')}"
        digits = "d" if key == "num_advantages" or key in reasons else ".3f"
        cells = [(effect.stored[key], digits), (effect.recomputed[key], digits), (effect.difference[key], "+" + digits)]
        made.add_row(visible(name), *("?" if value is None else format(value, how) for value, how in cells))
    return made


def compared(effect: Effect) -> str:
    """How the new advantages of an agent go with the old ones, in a line."""
    if "gae" in effect.estimators:
        return "gae: its advantages are made in the trainer, from a critic's values"
    if not effect.num_both:
        return "no trajectory has an advantage on both sides"
    found = f"{effect.num_both} trajectories have an advantage on both sides: "
    alike = "correlation unknown" if effect.correlation is None else f"correlation {effect.correlation:.3f}"
    return f"{found}{alike}, {effect.sign_changed:.1%} changed their sign"
