"""Options that several commands take."""

from __future__ import annotations

import click

dataset = click.option(
    "--dataset",
    default="hub",
    show_default=True,
    help="hub, hub@REVISION, mini, or a folder or file in the ELUDe schema.",
)
