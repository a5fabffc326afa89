"""What samples from a model: the `Engine` seam, an in-process sampler and a scripted one for tests.

`base` and `scripted` import without torch; `local` needs it, so it is imported by its own name.
"""

from cotrain.engines.base import Cohort, Engine, Request
from cotrain.engines.scripted import ScriptedEngine

__all__ = ["Cohort", "Engine", "Request", "ScriptedEngine"]
