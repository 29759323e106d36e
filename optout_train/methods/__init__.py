"""Methods that are more than a row of losses: each file's ``Method`` overrides hooks of ``UnlearnTrainer``.

``methods.toml`` has a table for each method: what ``--list-methods`` says of it, and its own settings.
"""
