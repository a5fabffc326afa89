"""The single-agent baseline on real questions: one agent that writes a query, reads what is found, and answers.

The same retriever, passages and rules as the search pipeline, without its reranker: the agent sees the first passages
that were found, as many as the pipeline's answerer is given. It is asked twice, and what it says the first time is the
query whatever it looks like, so that a model that was never taught a format can take part.
"""

from __future__ import annotations

from cotrain import Agent, Question, SamplingParams, System, Team, Trajectory
from cotrain.systems.search_pipeline import Passages, answer_faults, parse_queries, query_faults

QUERY = """\
Question: {question}

Write one short search query that finds the facts for the answer. Write nothing else."""

ANSWER = """\
Read this.
{passages}

Question: {question}
Give only the answer."""


def alone(*, num_passages: int = 6, num_read: int = 3, passage_words: int = 60, answer_words: int = 8) -> System:
    """The system.

    Args:
        num_passages: passages retrieved over all queries.
        num_read: of these, how many the agent reads: as many as the pipeline's answerer.
        passage_words: passages are cut to this many words.
        answer_words: an answer of more words than this is a fault.
    """

    async def run(team: Team, question: Question) -> Trajectory:
        asked = await team.ask("solver", message=QUERY.format(question=question.text), check=query_faults)
        queries = parse_queries(asked.output)[:4] or [question.text]
        found = Passages(await team.use("search", tuple(queries), num_passages), passage_words)
        message = ANSWER.format(passages=Passages(found[:num_read], passage_words), question=question.text)
        return await team.ask(
            "solver", message=message, reads=[asked], check=lambda output: answer_faults(output, answer_words)
        )

    solver = Agent(
        name="solver",
        model="base",
        system="You answer questions by searching.",
        prompt="{message}",
        sampling=SamplingParams(max_tokens=32),
    )
    return System(run=run, agents=(solver,), penalties={"solver": -0.5})
