"""Every error that cotrain raises on purpose.

Each one says three things: which object (by id), what was found with its value, and what to do.
`InfrastructureError` is special: it means that the world failed, not the policy, so the rollouts it reached are
removed and counted instead of being scored.
"""


class CotrainError(Exception):
    """Base of all errors of this package.

    Args:
        where: the object the error is about, by id or name.
        found: what was found there, with its value.
        fix: what the reader can do about it.
    """

    def __init__(self, where: str, found: str, fix: str) -> None:
        self.where, self.found, self.fix = where, found, fix
        super().__init__(f"{where}: {found}. {fix}.")

    def __reduce__(self) -> tuple[type["CotrainError"], tuple[str, ...]]:
        return type(self), (self.where, self.found, self.fix)


class ConfigError(CotrainError):
    """A configuration that cannot be run: an unknown key, a wrong value, two settings that exclude each other."""


class DataError(CotrainError):
    """A question, passage, file or folder that cannot be read as what it should be."""


class ModelError(CotrainError):
    """A model that cannot be found, loaded, saved or exported."""


class WorkflowError(CotrainError):
    """A system that breaks the rules of `Team`: an unknown agent, an output that nobody reads or scores."""


class ReplayError(WorkflowError):
    """A system that made other calls when its record was replayed."""


class RewardError(CotrainError):
    """A reward that is not a finite number."""


class TrainError(CotrainError):
    """An update that cannot be made, or a run that cannot be continued."""


class StoreError(CotrainError):
    """A shared store that cannot be reached, or that does not hold what it should."""


class LeaseLostError(StoreError):
    """A lease that expired and that somebody else holds now: whoever held it stops what it was doing."""


class ToolError(CotrainError):
    """A call that a tool refuses, such as a page that does not exist: the agent is told, and scored like any other."""


class InfrastructureError(CotrainError):
    """Something around the policy failed (an engine, a tool, a service); the rollout is removed and counted.

    Args:
        reason: the name it is counted under.
    """

    def __init__(self, where: str, found: str, fix: str, reason: str = "infrastructure") -> None:
        super().__init__(where, found, fix)
        self.reason = reason

    def __reduce__(self) -> tuple[type["CotrainError"], tuple[str, ...]]:
        return type(self), (self.where, self.found, self.fix, self.reason)
