"""The shared store: `base.py` says what it guarantees, `sql.py` keeps it in SQLite or PostgreSQL."""
