"""Train a team of LLM agents together, end to end, with reinforcement learning.

The names below are what a user's own system, reward or tool needs; importing them loads nothing heavy. Training itself
is `cotrain.train.train`, and the command line is `cotrain.cli`.
"""

from cotrain.advantages import group_relative
from cotrain.config import RunConfig, load_config
from cotrain.engines.base import Cohort, Engine, Request
from cotrain.engines.scripted import ScriptedEngine
from cotrain.episode import Tool
from cotrain.errors import CotrainError, InfrastructureError, ToolError
from cotrain.rewards import accuracy, credits, exact_match, f1, propagate, score
from cotrain.roster import Roster, System
from cotrain.sampling import Job, fork, fork_on_first, independent, round_robin
from cotrain.team import Team
from cotrain.types import (
    Agent,
    Completion,
    CreditRule,
    Group,
    Passage,
    Question,
    Sample,
    SamplingParams,
    ToolCall,
    Trajectory,
    Turn,
)

__all__ = [
    "Agent",
    "Cohort",
    "Completion",
    "CotrainError",
    "CreditRule",
    "Engine",
    "Group",
    "InfrastructureError",
    "Job",
    "Passage",
    "Question",
    "Request",
    "Roster",
    "RunConfig",
    "Sample",
    "SamplingParams",
    "ScriptedEngine",
    "System",
    "Team",
    "Tool",
    "ToolCall",
    "ToolError",
    "Trajectory",
    "Turn",
    "accuracy",
    "credits",
    "exact_match",
    "f1",
    "fork",
    "fork_on_first",
    "group_relative",
    "independent",
    "load_config",
    "propagate",
    "round_robin",
    "score",
]
