"""One PostgreSQL server for all contract tests of a session."""

from support_store import postgres as postgres
