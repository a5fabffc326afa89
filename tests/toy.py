"""A two-agent toy whose runs take seconds: a scout and a speaker, each of a few tokens."""

from dataclasses import replace

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


def two_models() -> System:
    """The toy with a model for each agent, `first` and `second`."""
    system = toy()
    agents = zip(system.agents, ("first", "second"), strict=True)
    return replace(system, agents=tuple(replace(agent, model=model) for agent, model in agents))


def vowels(answer: str, golds: tuple[str, ...]) -> float:
    """The share of the answer's characters that are vowels: a metric that a random model can climb."""
    return sum(c in "aeiou" for c in answer.lower()) / max(1, len(answer))
