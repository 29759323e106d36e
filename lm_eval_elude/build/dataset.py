"""From material to a data set's folder in ELUDe's schema. Calls are kept: a build that was killed goes on."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.build.checks import names_target
from lm_eval_elude.build.documents import Material
from lm_eval_elude.build.llm import Endpoint
from lm_eval_elude.build.pairs import Maker, Row
from lm_eval_elude.build.probe import FEW
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.data.sets import Split
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.names import called

CARD, CACHE, REJECTED = "README.md", "cache", "rejected.jsonl"
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Summary(NamedTuple):
    """Rows by file, what was left out by stage and reason, and what to do about it."""

    rows: dict[str, int]
    left: dict[str, int]
    advice: list[str]


def begin(out: Path, overwrite: bool) -> Path:
    """Make a data set's folder (mode 0700), unless other files are in it; where in it answered calls are kept."""
    if (out / CARD).exists() and not overwrite:
        raise UserError(f"--out {out}: there is a finished data set; --overwrite writes it again from its kept calls")
    if out.exists() and not (out / CACHE).is_dir() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: has other files in it; name another folder")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    (out / CARD).unlink(missing_ok=True)
    return out / CACHE


def build(
    out: Path, material: Material, endpoint: Endpoint, *, thing: bool = False, world: str = "mini", seed: int = 0,
    workers: int = 8,
) -> Summary:  # fmt: skip
    """Make the data set of a :class:`Material` in a folder of :func:`begin`; ``world`` is where its world set is from.

    UserError where the endpoint does not answer, or no pair about the target passed.
    """
    from datasets import Dataset, disable_progress_bars
    from jinja2 import Template

    disable_progress_bars()
    target, *others = material.names
    aliases = material.names[target][1:]
    names = called(Target(target, aliases, thing))
    made = Maker(endpoint, material.names, names).make(material.parts, workers)
    about = {"aliases": list(aliases), "others": others, "thing": thing}
    passed = [{"translated_question": None} | row | about for row in made if "left" not in row]
    left_out = [row for row in made if "left" in row]
    left_out += [{"left": f"reading: a file: {problem}"} for problem in material.problems]
    rows = {"forget_qa-train": [row for row in passed if row["subject"] == target]}
    rows |= split([row for row in passed if row["subject"] != target], seed)
    for part in SPLITS:
        records: list[Row] = [
            {**r.columns(), "translated_question": None} for r in load_records(world, "world", part).records
        ]
        named = [row for row in records if names_target([row["question"], row["answer"]], names)]
        rows[f"world-{part}"] = [row for row in records if row not in named]
        left_out += [row | {"left": "world: it names the target"} for row in named]
    jsonio.write_lines(out / REJECTED, left_out)
    summary = summarise({name: len(table) for name, table in rows.items()}, [row["left"] for row in left_out])
    if not rows["forget_qa-train"]:
        why = "; ".join(f"{reason} ({count})" for reason, count in [*summary.left.items()][:4])
        raise UserError(f"no pair about {target} passed: {why or 'none was written'}. {' '.join(summary.advice)}")
    for name, table in rows.items():
        (out / f"{name}.parquet").unlink(missing_ok=True)
        if table:
            Dataset.from_list(table).to_parquet(out / f"{name}.parquet")
    template = Template(Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8"), autoescape=True)
    sources = {part.document for part in material.parts}
    card = template.render(
        target=target, others=others, model=endpoint.model, world=world, sources=sources, summary=summary
    )
    (out / CARD).write_text(card, encoding="utf-8")
    return summary


def split(rows: Sequence[Row], seed: int) -> dict[str, list[Row]]:
    """Neighbours' pairs in paragraphs 8:1:1, those of a paragraph together."""
    texts = sorted({row["paragraph"] for row in rows})
    order = enumerate(random.Random(seed).sample(texts, len(texts)))
    place = {text: ("test", "validation", *["train"] * 8)[number % 10] for number, text in order}
    return {f"retain_qa-{name}": [row for row in rows if place[row["paragraph"]] == name] for name in SPLITS}


def summarise(rows: dict[str, int], reasons: Sequence[str]) -> Summary:
    """Count what was left out by stage and kind of reason, and say what to do."""
    kinds = Counter(":".join(reason.split(":")[:2]) for reason in reasons)
    left, advice = dict(kinds.most_common()), []
    if unanswered := sum(count for kind, count in left.items() if kind.endswith("no answer")):
        advice.append(f"{unanswered} calls got no answer: the same command with --overwrite asks for these alone.")
    if sum(count for kind, count in left.items() if "form asked for" in kind) > rows["forget_qa-train"]:
        advice.append("The model seldom keeps to the form: take a larger one that follows instructions.")
    if rows["forget_qa-train"] < FEW:
        advice.append(f"Fewer than {FEW} facts about the target, from which no score says much: add documents.")
    if not all(rows[f"retain_qa-{name}"] for name in SPLITS):
        advice.append("A split of the retain set is empty: add documents about neighbours, and --neighbours.")
    return Summary(rows, left, advice)
