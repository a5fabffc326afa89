"""What the tests share: a tokenizer of characters, small systems, a cast on a scripted engine."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from cotrain.engines.base import Request
from cotrain.engines.scripted import ScriptedEngine
from cotrain.roster import Roster, System
from cotrain.team import Team
from cotrain.types import Agent, Completion, Question, SamplingParams, Trajectory

Result = TypeVar("Result")


class CharTokenizer:
    """One token per character (its code point); id 0 ends a turn."""

    eos_token_id = 0
    all_special_ids = (0,)

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in token_ids if i or not skip_special_tokens)


class CharRenderer:
    """Messages as `role: content` lines."""

    native_tools = False

    def render(self, messages: Sequence[tuple[str, str]], tools: Sequence[tuple[str, str]] = ()) -> tuple[int, ...]:
        return tuple(ord(c) for role, content in messages for c in f"{role}: {content}\n")

    def extend(self, prompt_ids: tuple[int, ...], completion: Completion, results: Sequence[str]) -> tuple[int, ...]:
        said = completion.token_ids if completion.token_ids[-1:] == (0,) else (*completion.token_ids, 0)
        return (*prompt_ids, *said, *(ord(c) for c in f"results: {' | '.join(results)}\n"))

    def reply(self, completion: Completion) -> str:
        return completion.text.strip()

    def demonstration(self, text: str) -> tuple[int, ...]:
        return (*(ord(c) for c in text), 0)


WORDS = ["red", "blue", "green", "old", "stone", "river"]
GOLD = ("red old river",)


def random_words(prompt: str, request: Request) -> str:
    """One to four random words, a function of the request's key alone."""
    draw = random.Random(repr(request.key))
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 4)))


def chain(num_agents: int, penalties: dict[str, float] | None = None, repeat_first: bool = False) -> System:
    """Agents a0, a1, ... in a row; each reads the one before it. Faulty: an output that contains 'stone'."""
    names = [f"a{i}" for i in range(num_agents)]

    async def run(team: Team, question: Question) -> Trajectory:
        order = [*names, names[0], names[-1]] if repeat_first else names
        last = None
        for name in order:
            said = last.output if last else ""
            last = await team.ask(
                name,
                question=question.text,
                said=said,
                reads=[last] if last else [],
                check=lambda output: ["stone"] * output.split().count("stone"),
            )
        return last

    agents = tuple(
        Agent(name=n, model="base", prompt=n + " {question} {said}", sampling=SamplingParams(max_tokens=200))
        for n in names
    )
    return System(run=run, agents=agents, penalties=penalties or {})


def cast(system: System, script=random_words, tools=None) -> tuple[Roster, ScriptedEngine]:
    """A roster on a scripted engine, and the engine."""
    engine = ScriptedEngine(script, CharTokenizer())
    roster = Roster(
        agents={a.name: a for a in system.agents},
        engines={"base": engine},
        renderers={"base": CharRenderer()},
        tools=tools or {},
    )
    return roster, engine


def question(id: str = "q1") -> Question:
    return Question(id=id, text=f"what is {id}?", answers=GOLD)


def run(work: Coroutine[object, object, Result]) -> Result:
    return asyncio.run(work)
