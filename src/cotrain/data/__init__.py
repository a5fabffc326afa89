"""Questions, passages, retrieval and the generated world.

`questions` reads and writes cotrain's own JSONL files, `importers` turns the official files of public data sets into
them, `corpus` searches passages, `world` invents both. Import what you need from those modules: this one imports
nothing, so that reading a configuration never pays for a search library.
"""
