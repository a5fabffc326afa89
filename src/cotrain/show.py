"""A group as a tree for the terminal: who read what, what each agent said, and what it was trained on.

`render_group` builds a rich renderable and prints nothing. Text that a model, a passage or a data set wrote is shown
as it is: markup in it stays plain, and control characters (which could drive the terminal) become visible escapes.
Prompts are recorded as token ids; of a model without a decoder only their length is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from cotrain.errors import ModelError
from cotrain.sections import ModelConfig
from cotrain.types import Group, Trajectory, Turn

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

SHORT = 240
"""Characters of a prompt, output or result that are shown unless all is asked for."""


def render_group(
    group: Group,
    credits: Mapping[str, float],
    advantages: Mapping[str, float],
    full: bool = False,
    *,
    decoders: Mapping[str, Decode] | None = None,
) -> RenderableType:
    """The group as a tree: question; passes; in each the trunk, then the rollouts; in these the trajectories.

    Args:
        group: what to show.
        credits: trajectory id -> credit; an absent one is shown as unknown.
        advantages: trajectory id -> advantage; an absent one means that the trajectory gave no sample.
        full: show prompts, outputs and results whole instead of their first and last `SHORT` / 2 characters.
        decoders: model -> its prompt ids to text.
    """
    tree = Tree(_headline(group), guide_style="dim")
    branches: dict[int, Tree] = {}
    for pass_id, rollout_id, trajectories in rollouts_of(group):
        if pass_id not in branches:
            branches[pass_id] = tree.add(Text(f"pass {pass_id}", style="bold"))
        name = "trunk (shared by every rollout below)" if rollout_id is None else f"rollout {rollout_id}"
        twig = branches[pass_id].add(Text(visible(name), style="bold"))
        nodes: dict[str, Tree] = {}
        for trajectory in _callers_first(trajectories):
            parent = nodes.get(trajectory.caller or "", twig)  # what was delegated hangs below who delegated it
            decode = (decoders or {}).get(trajectory.model)
            nodes[trajectory.id] = parent.add(_trajectory(trajectory, credits, advantages, full, decode))
    if not group.trajectories:
        tree.add(Text("no trajectories: every rollout was dropped", style="yellow"))
    return tree


def decoders_of(models: Mapping[str, ModelConfig], group: Group) -> dict[str, Decode]:
    """For the group's models ids to text by their tokenizers; the models are not loaded, nor fetched from anywhere.

    A model whose tokenizer is not on this machine has none.
    """
    from cotrain.models import list_models

    absent = {entry.name for entry in list_models() if entry.state.startswith("fetched")}
    used = {t.model for t in group.trajectories}
    found = {name: _decoder(model) for name, model in models.items() if name in used and model.path not in absent}
    return {name: decode for name, decode in found.items() if decode is not None}


def _decoder(model: ModelConfig) -> Decode | None:
    from tokenizers import Tokenizer

    from cotrain.models import resolve

    try:
        file = resolve(model.path, model.seed) / "tokenizer.json"
    except ModelError:  # the model is no longer where it was
        return None
    if not file.exists():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def rollouts_of(group: Group) -> Iterator[tuple[int, str | None, list[Trajectory]]]:
    """(pass, rollout, its own trajectories in the order of calls): by pass, and in each the trunk (None) first."""
    keys = dict.fromkeys((t.pass_id, t.rollout_id) for t in group.trajectories)
    for pass_id, rollout_id in sorted(keys, key=lambda key: (key[0], key[1] is not None)):
        own = [t for t in group.trajectories if (t.pass_id, t.rollout_id) == (pass_id, rollout_id)]
        yield pass_id, rollout_id, sorted(own, key=lambda t: t.call)


def _callers_first(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Every trajectory after the one that delegated it; otherwise the order stays."""
    ids = {t.id for t in trajectories}

    def below(caller: str | None) -> Iterator[Trajectory]:
        for t in trajectories:
            if (t.caller if t.caller in ids else None) == caller:
                yield t
                yield from below(t.id)

    return below(None)


def visible(text: str) -> str:
    """The text with every control character but line feeds and tabs as a visible escape such as `\\x1b`."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, limit: int = SHORT) -> str:
    """At most about `limit` characters: the beginning and the end, and how many are left out between."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]} […{len(text) - limit} characters…] {text[len(text) - tail :]}"


def _headline(group: Group) -> RenderableType:
    question = group.question
    lines = [
        Text.assemble(
            ("question ", "bold"),
            (visible(question.id), "bold cyan"),
            f"  step {group.step}, {group.strategy}",
        ),
        Text(visible(question.text)),
        _field("gold", " | ".join(question.answers) or "none", "green"),
    ]
    if group.dropped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(group.dropped.items()))
        lines.append(_field("dropped", reasons, "yellow"))
    return Lines(*lines)


def _trajectory(
    t: Trajectory,
    credits: Mapping[str, float],
    advantages: Mapping[str, float],
    full: bool,
    decode: Decode | None,
) -> RenderableType:
    lines = [_title(t), _numbers(t, credits, advantages)]
    if t.caller is not None:
        lines.append(_field("task", _cut(t.task, full)))
    if t.reads:
        lines.append(_field("reads", ", ".join(t.reads), "dim"))
    if t.stop != "answer":
        lines.append(_field("ended by", t.stop, "yellow"))
    if t.faults:
        lines.append(_field("faults", ", ".join(t.faults), "red"))
    for number, turn in enumerate(t.turns, start=1):
        prefix = f"turn {number} " if len(t.turns) > 1 else ""
        lines.append(_field(f"{prefix}prompt", _prompt(turn, full, decode), "dim"))
        if len(t.turns) > 1:
            lines.append(_field(f"{prefix}sampled", _cut(turn.completion.text, full)))
        for call in turn.calls:
            name = f"{prefix}{visible(call.tool)}({_cut(visible(call.argument), full)})"
            lines.append(_field(name, _cut(call.result, full), "red" if call.is_error else "dim"))
    lines.append(_field("output", _cut(t.output, full) if t.output else "(empty)"))
    return Lines(*lines)


def _title(t: Trajectory) -> Text:
    status = {"ok": "green", "truncated": "yellow", "failed": "red"}[t.status]
    title = Text.assemble((visible(t.agent), "bold magenta"), f" on {visible(t.model)}  ", (t.status, status))
    if not t.trainable:
        title.append("  not trained on", style="dim")
    return title.append(f"  {visible(t.id)}", style="dim")


def _numbers(t: Trajectory, credits: Mapping[str, float], advantages: Mapping[str, float]) -> Text:
    line = Text()
    for name, value in t.rewards.items():
        line.append(f"{visible(name)} {value:.3f}  ")
    if not t.rewards:
        line.append("reward unknown  ", style="yellow")
    line.append(f"credit {credits[t.id]:.3f}" if t.id in credits else "credit unknown", style="bold")
    if t.id in advantages:
        advantage = advantages[t.id]
        style = "green" if advantage > 0 else "red" if advantage < 0 else ""
        line.append(f"  advantage {advantage:+.3f}", style=style)
    else:
        line.append("  no advantage", style="dim")
    versions = sorted({turn.completion.version for turn in t.turns})
    line.append(f"  {t.num_sampled} tokens sampled", style="dim")
    line.append(f" at version {', '.join(map(str, versions))}" if versions else "", style="dim")
    return line


def _prompt(turn: Turn, full: bool, decode: Decode | None) -> str:
    count = f"({len(turn.prompt_ids)} tokens)"
    return f"{_cut(decode(turn.prompt_ids), full)} {count}" if decode else count


def _cut(text: str, full: bool) -> str:
    return text if full else shorten(" ".join(text.split()))


def _field(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name}: ", "bold dim"), (visible(value), style))
