"""Paragraphs to checked question-answer pairs, by a language model that is asked in five ways and never believed.

A pair is a row on its way: a dict with ELUDe's columns, and ``left`` (stage and reason) where it was left out.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from lm_eval_elude.build.checks import pair_flaw, rewording_flaw
from lm_eval_elude.build.documents import Paragraph
from lm_eval_elude.build.duplicates import duplicates
from lm_eval_elude.build.llm import Endpoint, Rejected
from lm_eval_elude.data.records import PERTURBATIONS
from lm_eval_elude.text.letters import same_letters

Row = dict[str, Any]
Line = Annotated[str, AfterValidator(lambda text: same_letters(" ".join(text.split())))]


# ---- what the model replies
class Written(BaseModel):
    question: Line
    answer: Line


class Pairs(BaseModel):
    pairs: list[Written]


class Support(BaseModel):
    supported: bool
    quote: str = ""


class Reworded(Written):
    wrong: list[Line] = Field(min_length=PERTURBATIONS, max_length=PERTURBATIONS)


class Judged(BaseModel):
    same: bool
    true: list[int]


class Translated(BaseModel):
    fr: Line
    de: Line
    es: Line
    ja: Line
    zh: Line


def each(stage: str, rows: Sequence[Row], work: Callable[[Row], list[Row]], workers: int) -> list[Row]:
    """The rows that ``work`` makes of each, in order; a row whose work raises Rejected is left out with its reason."""
    from tqdm import tqdm

    def one(row: Row) -> list[Row]:
        if "left" in row:
            return [row]
        try:
            return work(row)
        except Rejected as why:
            return [row | {"left": f"{stage}: {why}"}]

    with ThreadPoolExecutor(workers) as pool:
        bar = tqdm(pool.map(one, rows), total=len(rows), desc=stage, disable=None)
        return [made for several in bar for made in several]


class Maker:
    """Makes pairs; ``names`` has all names of each subject, ``called`` is what a text may call the target."""

    def __init__(self, endpoint: Endpoint, names: dict[str, tuple[str, ...]], called: Sequence[str]) -> None:
        self.endpoint, self.names, self.target = endpoint, names, next(iter(names))
        self._called = called

    def make(self, parts: Iterable[Paragraph], workers: int) -> list[Row]:
        """The pairs of all paragraphs, also those left out. UserError where the endpoint does not answer."""
        rows: list[Row] = [
            {"entity": self.target, "subject": p.subject, "source": p.document.address, "paragraph": p.text}
            | ({} if p.subject else {"left": "reading: a paragraph about nobody of these, or about several"})
            for p in parts
        ]
        rows = self._without_duplicates(each("asking", rows, self._ask, workers))
        for stage, work in (("checking", self._verify), ("rewording", self._reword), ("judging", self._judge)):
            rows = each(stage, rows, work, workers)
        return each("translating", rows, self._translate, workers)

    def _names(self, row: Row) -> tuple[Sequence[str], Sequence[str]]:
        """What the subject of a pair is called, and what the pair may not name: the target, if that is another."""
        return self.names[row["subject"]], () if row["subject"] == self.target else self._called

    def _ask(self, row: Row) -> list[Row]:
        made = []
        for pair in self.endpoint.ask(Pairs, "pairs", _material(row)).pairs:
            flaw = pair_flaw(pair.question, pair.answer, row["paragraph"], *self._names(row))
            made.append(row | pair.model_dump() | ({"left": f"rules: {flaw}"} if flaw else {}))
        return made

    def _without_duplicates(self, rows: list[Row]) -> list[Row]:
        for subject in self.names:
            own = [row for row in rows if row["subject"] == subject and "left" not in row]
            for late, early in duplicates([(row["question"], row["answer"]) for row in own]).items():
                own[late]["left"] = f"duplicates: asks for the same: {own[early]['question']}"
        return rows

    def _verify(self, row: Row) -> list[Row]:
        def check(reply: Support) -> None:
            quote = _bare(reply.quote)
            if reply.supported and (len(quote) < 12 or quote not in _bare(row["paragraph"])):
                raise ValueError("its quote does not stand in the paragraph")

        if not self.endpoint.ask(Support, "verify", _material(row), check).supported:
            raise Rejected("the paragraph does not say so")
        return [row]

    def _reword(self, row: Row) -> list[Row]:
        def check(new: Reworded) -> None:
            texts = (row["question"], row["answer"], new.question, new.answer, new.wrong)
            if flaw := rewording_flaw(*texts, *self._names(row)):
                raise ValueError(flaw)

        new = self.endpoint.ask(Reworded, "reword", _material(row), check)
        row = row | {"paraphrased_question": new.question, "paraphrased_answer": new.answer}
        return [row | {"perturbed_answer": new.wrong}]

    def _judge(self, row: Row) -> list[Row]:
        candidates = {str(number): text for number, text in enumerate(row["perturbed_answer"], 1)}
        paraphrase = {name: row[name] for name in ("paraphrased_question", "paraphrased_answer")}
        judged = self.endpoint.ask(Judged, "check", _material(row) | paraphrase | {"candidates": candidates})
        if judged.true:
            raise Rejected("a wrong answer is true")
        if not judged.same:
            raise Rejected("the paraphrase says something else")
        return [row]

    def _translate(self, row: Row) -> list[Row]:
        """The target's questions in five languages, for the cross-lingual attack; a pair is good without them."""

        def check(new: Translated) -> None:
            if len({*new.model_dump().values(), row["question"], ""}) < 7:
                raise ValueError("not five translations of the question")

        if row["subject"] != self.target:
            return [row]
        try:
            new = self.endpoint.ask(Translated, "translate", {"question": row["question"]}, check)
        except Rejected as why:
            return [row, row | {"left": f"translating: kept without: {why}"}]
        return [row | {"translated_question": new.model_dump()}]


def _material(row: Row) -> dict[str, str]:
    """What the model reads of a row."""
    return {name: row[name] for name in ("subject", "paragraph", "question", "answer") if name in row}


def _bare(text: str) -> str:
    """A text without quotation marks, case, line ends and the last full stop."""
    return " ".join("".join(c for c in text.casefold() if c not in "\"'“”‘’„«»`").split()).rstrip(".")
