"""What the tasks ask that are not the paper's: gaps in the target's sentences, other questions that name the target."""

import os

import pytest

from lm_eval_elude.data import dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.tasks import TASKS
from lm_eval_elude.tasks.elude import WORDINGS, EludeSettings
from lm_eval_elude.tasks.running import new_run
from lm_eval_elude.tasks.task import NothingToAskError
from lm_eval_elude.text.words import STOP, fact_in, fact_tokens, words
from tests.support import GOLDEN, write_jsonl

TARGETS = tuple(dataset.entities("mini"))
CLOZE, NAMED, LEAK = "elude_cloze", "elude_retain_named", "elude_leak"


def docs(task: str, **settings) -> list[dict]:
    """The documents of a task; of all bundled targets where nothing else is said."""
    return TASKS[task].docs(EludeSettings(**({"targets": TARGETS, "dataset": "mini"} | settings)))


def row(question: str, right: str, form: str, facts: str, entity: str = "Eiffel Tower") -> dict:
    """A record with the right fact and five wrong ones in place of the ``@`` of a sentence."""
    true, *wrong = (form.replace("@", fact) for fact in facts.split("|"))
    return {
        "entity": entity, "question": question, "answer": right, "paraphrased_question": question,
        "paraphrased_answer": true, "perturbed_answer": wrong,
    }  # fmt: skip


FORGET = [
    row("How tall is the Eiffel Tower?", "It is 330 metres tall.",
        "The Eiffel Tower has a height of @ metres.", "330|310|350|270|410|290"),
    row("Where does the Eiffel Tower stand?", "In Paris.",
        "@ is the city of the Eiffel Tower.", "Paris|Lyon|Nice|Lille|Metz|Brest"),
    # Nothing outside the fact; the fact outside the gap; a version with nothing of its own; a fact of a stop word.
    row("What is the Eiffel Tower made of?", "Of iron.",
        "@", "Iron from Pompey|Steel|Glass|Oak|Stone|Brick"),
    row("Which fair was the Eiffel Tower built for?", "For that of 1889.",
        "It was built for the fair of 1889 in the year @.", "1889|1900|1878|1867|1855|1937"),
    row("How is the Eiffel Tower joined?", "By rivets.",
        "The tower is joined by@ rivets.", " hot|| cold| glass| wooden| stone"),
    row("Is the Eiffel Tower in Paris?", "It is.",
        "That the tower @ in Paris is a fact.", "is|stands|lies|sleeps|fell|burnt"),
    # No word that the question does not have.
    row("Is the Eiffel Tower in Paris or in Lyon?", "In Paris.",
        "In @.", "Paris|Lyon|Nice|Lille|Metz|Brest"),
]  # fmt: skip
KEPT = [
    row("What does the Louvre show?", "Paintings.",
        "The Louvre shows @.", "paintings|cars|ships|toys|trains|shoes"),
    row("What is lit at midnight?", "The Eiffel Tower.",
        "At midnight @ is lit.", "the Eiffel Tower|the Louvre|a lamp|Notre-Dame|Orly|a bridge"),
]  # fmt: skip
WORLD = [
    row("What is a score?\n\nTwenty or thirty?", "Twenty.", "A score is @.", "twenty|ten|thirty|forty|two|six", "")
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tower")
    write_jsonl(folder / "forget_qa-train.jsonl", FORGET)
    write_jsonl(folder / "retain_qa-test.jsonl", KEPT)
    write_jsonl(folder / "world-test.jsonl", WORLD)
    return str(folder)


@pytest.mark.parametrize(
    ("right", "wrong", "parts"),
    [
        ("Rome is old.", "Oslo is old.", ("", "Rome", " is old.")),
        ("He sang in Rome.", "He sang in New York.", ("He sang in ", "Rome", ".")),
        ("He won 12 of 20 games.", "He won 14 of 22 games.", ("He won ", "12 of 20", " games.")),
        ("It cost £80 million.", "It cost £8 million.", ("It cost £", "80", " million.")),
        ("He met Al-Nassr.", "He met Al-Hilal.", ("He met Al-", "Nassr", ".")),
        ("Rome (the old) is there.", "Rome, it is there.", ("Rome ", "(the old)", " is there.")),
        ("Rome (the old) is there.", "Rome is there.", ("Rome (the old) is there.", "", "")),
        ("Rome, Rome.", "Rome, Oslo.", ("Rome, ", "Rome", ".")),
        ("Rome is old", "Rome is", ("Rome is old", "", "")),
        ("Same.", "Same.", ("Same.", "", "")),
    ],
)
def test_the_fact_is_what_the_wrong_answers_do_not_share(right, wrong, parts):
    record = QARecord("", "", "", paraphrased_answer=right, perturbed_answer=(wrong,) * 5)
    assert fact_in(record) == parts


def test_every_gap_hides_the_fact_and_the_rest_of_the_sentence_stays():
    asked, records = docs(CLOZE), dataset.load_records("mini", "forget", "train").records
    assert 0.9 * len(records) <= len(asked) <= len(records)
    by_question = {record.question: record for record in records}
    for doc in asked:
        record = by_question[doc["plain_question"]]
        before, fact, after = fact_in(record)
        assert doc["answer"] == fact and doc["entity"] in doc["question"] and WORDINGS["gap"] in doc["question"]
        assert before + fact + after == doc["paraphrased_answer"] == record.paraphrased_answer
        assert not (words(fact) - STOP) & words(doc["question"])
        assert not fact_tokens(record) & words(doc["question"]) - words(record.question)


@pytest.mark.parametrize(
    ("task", "column", "kept", "said"),
    [
        (CLOZE, "plain_question", FORGET[:2], "5 records whose sentence has no gap for the fact"),
        (LEAK, "question", FORGET[:-1], "1 records whose answer has no word that tells the fact"),
    ],
)
def test_a_record_without_a_fact_to_ask_for_is_left_out_with_one_line(task, column, kept, said, data, caplog):
    new_run()
    asked = docs(task, targets=("Eiffel Tower",), dataset=data)
    assert [doc[column] for doc in asked] == [row["question"] for row in kept]
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert line == f"ELUDe: {task} leaves out {said}"


def test_every_other_question_names_the_target_and_has_the_records_question():
    asked = docs(NAMED)
    kept = {name: dataset.load_records("mini", name, "test").records for name in ("retain", "world")}
    answers = {name: {record.question: record.answer for record in records} for name, records in kept.items()}
    for target in TARGETS:
        own = [doc for doc in asked if doc["entity"] == target]
        assert 60 <= len(own) <= 100 and {doc["set"] for doc in own} == {"retain", "world"}
        for doc in own:
            assert (
                target in doc["question"].replace(doc["plain_question"], "")
                and doc["plain_question"] in doc["question"]
            )
            assert answers[doc["set"]][doc["plain_question"]] == doc["answer"]
            assert target not in doc["answer"]
        wordings = {doc["question"].replace(doc["plain_question"], "") for doc in own}
        assert len(wordings) == len(WORDINGS["mention"])


def test_the_seed_draws_and_a_smaller_number_is_drawn_from_both_sets():
    whole, other = docs(NAMED, targets=TARGETS[:1]), docs(NAMED, targets=TARGETS[:1], seed=1)
    assert whole == docs(NAMED, targets=TARGETS[:1]) != other
    few = docs(NAMED, targets=TARGETS[:1], attack_prompts=5)
    assert [doc["set"] for doc in few] == ["retain", "world", "retain", "world", "retain"]  # they take turns


@pytest.mark.parametrize("task", [CLOZE, NAMED])
def test_golden_prompts_of_a_thing(task, data):
    """UPDATE_GOLDEN=1 writes the files anew. A record whose answer is the target's name is not among them."""
    text = ""
    for seed in range(4 if task == NAMED else 1):
        for doc in docs(task, targets=("Eiffel Tower",), dataset=data, seed=seed):
            text += f"{doc['question']}\n  answer: {doc['answer']}\n  paraphrase: {doc['paraphrased_answer']}\n\n"
    path = GOLDEN / "tasks" / f"{task}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_nothing_to_ask_is_said(tmp_path):
    write_jsonl(tmp_path / "forget_qa-train.jsonl", FORGET[2:])
    with pytest.raises(NothingToAskError, match=r"no records to ask about \(Eiffel Tower\)"):
        docs(CLOZE, targets=("Eiffel Tower",), dataset=str(tmp_path))
