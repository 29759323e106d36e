"""Pages from templates: what is given to one is escaped, its own style and script stand inside, no other may run."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(template: Path, **values: Any) -> str:
    """A page of the template ``NAME.html.j2`` with these ``values``.

    ``NAME.css`` and ``NAME.js`` beside it are its ``style`` and ``script``, which begins with what all share; its
    policy lets ``script_hash`` alone run.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    for name, ending in (("style", ".css"), ("script", ".js")):
        if (file := template.with_name(template.name.split(".")[0] + ending)).is_file():
            values[name] = file.read_text(encoding="utf-8")
    if "script" in values:
        values["script"] = Path(__file__).with_name("base.js").read_text(encoding="utf-8") + values["script"]
        values["script_hash"] = base64.b64encode(hashlib.sha256(values["script"].encode()).digest()).decode()
    return environment.get_template(template.name).render(values)
