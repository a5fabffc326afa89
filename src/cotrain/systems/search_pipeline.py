"""The search team of MHGPO: question -> rewriter -> retriever -> reranker -> answerer.

Copy this file to write a system of your own: a function that returns a `System`, with its agents' prompts, the
coroutine that they work in, and the rules for their outputs. Source of the team: MHGPO (arXiv 2506.02718).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from cotrain.roster import System
from cotrain.team import Team
from cotrain.types import Agent, Passage, Question, SamplingParams, Trajectory

REWRITER_SYSTEM = "You write search queries."
REWRITER = """\
Question: {question}

Write one short search query that finds the facts for the answer. Write nothing else. \
If one is not enough, write up to four, each on its own line."""

RERANKER_SYSTEM = "You pick passages by their numbers."
RERANKER = """\
{passages}

Question: {question}

Which passages help to answer the question? Reply with their numbers only, like this: [2] [1]"""

ANSWERER_SYSTEM = "You answer with a few words only."
ANSWERER = """\
Read this.
{passages}

Question: {question}
Give only the answer."""

MAX_QUERIES, MAX_QUERY_CHARACTERS = 4, 300


def search_pipeline(
    *, num_passages: int = 10, num_picks: int = 3, passage_words: int = 60, answer_words: int = 30
) -> System:
    """The system.

    Args:
        num_passages: passages retrieved over all queries.
        num_picks: most passages that the answerer sees.
        passage_words: passages are cut to this many words.
        answer_words: an answer of more words than this is a fault.
    """

    async def run(team: Team, question: Question) -> Trajectory:
        rewriter = await team.ask("rewriter", question=question.text, check=query_faults)
        queries = parse_queries(rewriter.output)[:MAX_QUERIES] or [question.text]
        found = Passages(await team.use("search", tuple(queries), num_passages), passage_words)
        reranker = await team.ask(
            "reranker",
            question=question.text,
            passages=found,
            reads=[rewriter],
            check=lambda output: pick_faults(output, len(found)),
        )
        picks = parse_picks(reranker.output, len(found)) or list(range(len(found)))
        return await team.ask(
            "answerer",
            question=question.text,
            passages=Passages([found[i] for i in picks[:num_picks]], passage_words),
            reads=[reranker],
            check=lambda output: answer_faults(output, answer_words),
        )

    return System(
        run=run,
        agents=(
            Agent(
                name="rewriter",
                model="base",
                system=REWRITER_SYSTEM,
                prompt=REWRITER,
                sampling=SamplingParams(max_tokens=48),
            ),
            Agent(
                name="reranker",
                model="base",
                system=RERANKER_SYSTEM,
                prompt=RERANKER,
                sampling=SamplingParams(max_tokens=24),
            ),
            Agent(
                name="answerer",
                model="base",
                system=ANSWERER_SYSTEM,
                prompt=ANSWERER,
                sampling=SamplingParams(max_tokens=32),
            ),
        ),
        penalties={"rewriter": -0.5, "reranker": -1.0, "answerer": -1.0},
        demonstrate=demonstrate,
    )


class Passages(tuple[Passage, ...]):
    """Passages that print as a numbered list, `[1] title: text`, each cut to a number of words."""

    def __new__(cls, passages: object, words: int) -> Passages:
        """Wrap passages, cutting each text to `words` words."""
        assert isinstance(passages, Sequence)
        cut = (Passage(title=p.title, text=" ".join(p.text.split()[:words])) for p in passages)
        return super().__new__(cls, cut)

    def __format__(self, spec: str) -> str:
        return "\n".join(f"[{i}] {p.title}: {p.text}" for i, p in enumerate(self, start=1))


def parse_queries(output: str) -> list[str]:
    """The non-empty lines, without list marks."""
    lines = (re.sub(r"^\s*(?:[-*•]|\d+[.)])\s+", "", line).strip() for line in output.splitlines())
    return [line for line in lines if line]


def query_faults(output: str) -> list[str]:
    """`no_query`, `many_queries` (more than 4), `long_queries` (more than 300 characters in all)."""
    queries = parse_queries(output)
    faults = {
        "no_query": not queries,
        "many_queries": len(queries) > MAX_QUERIES,
        "long_queries": sum(map(len, queries)) > MAX_QUERY_CHARACTERS,
    }
    return [name for name, broken in faults.items() if broken]


def parse_picks(output: str, num_passages: int) -> list[int]:
    """Positions (from 0) of the passages that the output names; malformed, repeated and impossible ids are ignored."""
    numbers = (int(word) - 1 for word in _ids(output) if word.isascii() and word.isdigit() and len(word) <= 6)
    return list(dict.fromkeys(n for n in numbers if 0 <= n < num_passages))


def pick_faults(output: str, num_passages: int) -> list[str]:
    """`no_id`, `malformed_id` (anything but numbers, bare or in brackets), `id_out_of_range`, `repeated_id`."""
    words = _ids(output)
    numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) <= 6]
    faults = {
        "no_id": not numbers,
        "malformed_id": len(numbers) < len(words),
        "id_out_of_range": any(not 1 <= n <= num_passages for n in numbers),
        "repeated_id": len(set(numbers)) < len(numbers),
    }
    return [name for name, broken in faults.items() if broken]


def _ids(output: str) -> list[str]:
    """The words of the output; a well-formed one is a number, bare or in brackets, with a comma after it or not."""
    spaced = output.replace("][", "] [").replace(",", " ")
    return [word[1:-1] if word.startswith("[") and word.endswith("]") else word for word in spaced.split()]


def answer_faults(output: str, most_words: int) -> list[str]:
    """`no_answer`, `long_answer` (more than `most_words` words)."""
    faults = {"no_answer": not output.strip(), "long_answer": len(output.split()) > most_words}
    return [name for name, broken in faults.items() if broken]


def demonstrate(agent: str, question: Question, fields: Mapping[str, object]) -> str | None:
    """What a rule would say: the question as a query, the numbers of the supporting pages, the gold answer."""
    if agent == "rewriter":
        return question.text.rstrip("?")
    if agent == "reranker":
        passages = fields["passages"]
        assert isinstance(passages, Passages)
        supporting = [i for i, p in enumerate(passages, start=1) if p.title in question.supporting_titles]
        return " ".join(f"[{i}]" for i in supporting or [1])
    if agent == "answerer":
        return question.answers[0]
    return None
