"""A two-agent toy whose runs take seconds: a scout and a speaker, each of a few tokens."""

from cotrain import Agent, Question, SamplingParams, System, Team, Trajectory


def toy() -> System:
    async def run(team: Team, question: Question) -> Trajectory:
        scout = await team.ask("scout", question=question.text, check=lambda output: [] if output else ["empty"])
        return await team.ask("speaker", question=question.text, said=scout.output, reads=[scout])

    few = SamplingParams(max_tokens=6)
    return System(
        run=run,
        agents=(
            Agent(name="scout", model="base", prompt="{question}", sampling=few),
            Agent(name="speaker", model="base", prompt="{said} {question}", sampling=few),
        ),
        penalties={"scout": -0.1},
        demonstrate=lambda agent, question, fields: question.answers[0],
    )


def vowels(answer: str, golds: tuple[str, ...]) -> float:
    """The share of the answer's characters that are vowels: a metric that a random model can climb."""
    return sum(c in "aeiou" for c in answer.lower()) / max(1, len(answer))
