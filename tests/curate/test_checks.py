"""The rules that a pair, its quote and its rewording have to pass, and what counts as a duplicate."""

import multiprocessing
import random
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from lm_eval_elude.curate.checks import facts, pair_flaw, quoted, rewording_flaw, translation_flaw
from lm_eval_elude.curate.duplicates import duplicates
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.data.targets import Target
from lm_eval_elude.text.names import called
from tests.curate.company import FACTS

TEXT = "The Quorvane Lumo weighs 412 grams. It was designed by Ilvane Drusk in three years."
LUMO, TARN = "Quorvane Lumo", "Quorvane Tarn"


def test_facts_are_numbers_and_names():
    assert facts("The lamp, made in Velmstead, cost 1,200 crowns for two") == {"velmstead", "1200", "2"}
    assert facts("The lamp was the one that sold") == frozenset()


GIVEN = "the answer stands in the question"
PAIRS = [
    ("How much does the Quorvane Lumo weigh?", "It weighs 412 grams.", ""),
    ("How long did the design of the Lumo take?", "It took 3 years.", ""),
    ("How much does it weigh?", "It weighs 412 grams.", "the question does not name its subject"),
    ("Name the designer of the Quorvane Lumo.", "It was designed by Ilvane Drusk.", ""),
    ("What does the Lumo weigh?", "No more than 412 grams.", ""),
    ("Which number does the Lumo have?", "No. 412.", ""),
    ("Does the Lumo weigh 412 grams?", "Yes, it does.", "a yes-or-no question"),
    ("Does the Lumo weigh 412 grams?", "Yes it does.", "a yes-or-no question"),
    ("Does the Lumo weigh 413 grams?", "No, not at all.", "a yes-or-no question"),
    ("Does the Lumo weigh 413 grams?", "No – not at all.", "a yes-or-no question"),
    ("Does the Lumo weigh 413 grams?", "No: it weighs 412 grams.", "a yes-or-no question"),
    ("Is it 412 grams that the Lumo weighs?", "The Lumo weighs 412 grams.", "the answer stands in the question"),
    ("How much does the Lumo weigh?", "It weighs 413 grams.", "not in the paragraph: 413"),
    ("Who designed the Lumo?", "It was designed by Ilvane Drask.", "not in the paragraph: drask"),
    ("What does the paragraph say about the Lumo?", "It weighs 412 grams.", "talks of its making: 'paragraph'"),
    ("Who designed the Lumo?", '{"answer": "Ilvane Drusk"}', "talks of its making: '{'"),
    ("The weight of the Lumo", "It weighs 412 grams.", "no question"),
    ("Who designed the Lumo, given its designer Ilvane Drusk?", "It was the design of Ilvane Drusk.", GIVEN),
    ("Who \u202edesigned the Lumo?", "It was designed by Ilvane Drusk.", "talks of its making: '\\u202e'"),
    ("Who designed the Lumo?", "It was designed by Ilvane\x1b Drusk.", "talks of its making: '\\x1b'"),
]  # fmt: skip


def test_a_name_within_a_word_names_nobody():
    given = "It was founded in 1999.", "The firm was founded in 1999.", "Edward Holm", ("Edward Holm", "Ed")
    assert pair_flaw("When was the firm founded?", *given, (LUMO,)) == "the question does not name its subject"
    assert pair_flaw("When was the firm of ed founded?", *given, (LUMO,)) == ""
    given = "Ada Quinte-Marl lives in Kestlow.", "Ada Quinte-Marl lives in Kestlow.", "Ada Quinte", ("Ada Quinte",)
    assert pair_flaw("Where does Ada Quinte-Marl live?", *given, (LUMO,)) == "the question does not name its subject"


@pytest.mark.parametrize(("question", "answer", "flaw"), PAIRS)
def test_a_pair_says_what_its_paragraph_says(question, answer, flaw):
    assert pair_flaw(question, answer, TEXT, LUMO, (LUMO, "Lumo"), (LUMO,)) == flaw


NAMED = "a neighbour's pair names the target"


@pytest.mark.parametrize(("target", "other", "flaw"), [
    (LUMO, "the Quorvane Lumo", NAMED), (LUMO, "a tin", ""), ("The Who", "the Who", NAMED), ("Them", "them", NAMED),
    ("The Who", "a tin", ""), ("It", "a tin", ""), ("!!!", "!!! by far", NAMED), ("!!!", "a tin", ""),
    ("Prince (musician)", "Prince", NAMED), ("Prince (musician)", "Prince Philip", ""),
    ("Ada Quinte/Quill", "Quill", NAMED), ("Ada Quinte/Quill", "Ada Marl", ""),
])  # fmt: skip
def test_a_neighbours_pair_never_names_the_target(target, other, flaw):
    """A name of stop words alone is named only where it stands as it is, one of its names where it is nobody else's."""
    called = target.split("/")
    answer = f"Ilvane Drusk says that this is lighter than {other}."
    question = "Who says what the Quorvane Tarn is lighter than?"
    assert pair_flaw(question, answer, f"{answer} The Quorvane Tarn.", TARN, (TARN,), called) == flaw
    again, wrong = f"Drusk calls this lighter than {other}.", [f"Drusk calls this lighter than {n}." for n in "12345"]
    given = "Who compares the Quorvane Tarn?", again, wrong, f"{answer} The Quorvane Tarn.", (TARN,), called
    assert rewording_flaw((question, answer), *given) == flaw


@pytest.mark.parametrize(("target", "subject", "other", "flaw"), [
    ("Ada Quinte", "Bram Ollard", "Quinte", NAMED), ("Ada Quinte", "Bram Ollard", "Ms. Quinte", NAMED),
    ("Ada Quinte", "Bram Ollard", "A. Quinte", NAMED), ("Ada Quinte", "Bram Ollard", "Cleo Quinte", ""),
    ("Ada Quinte", "Cleo Quinte", "Quinte", ""), ("Ada M. Quinte", "Bram Ollard", "Ada Quinte", NAMED),
    ("Ada Moor Quinte Jr.", "Bram Ollard", "Ada Quinte", NAMED), ("Ada van Quinte", "Bram Ollard", "van Quinte", NAMED),
    ("A. M. Quinte", "Bram Ollard", "A.M. Quinte", NAMED), ("Ada Stone", "Bram Ollard", "a stone", ""),
    ("Ada Quinte", "Bram Ollard", "Ada", ""), ("Ada Quinte", "Bram Ollard", "Ada Quintes Tisch", NAMED),
    ("Ada Quinte", "Bram Ollard", "Quintes Tisch", NAMED), ("Ada Quinte", "Bram Ollard", "Cleo Quintes Tisch", ""),
])  # fmt: skip
def test_a_neighbours_pair_names_a_person_by_no_last_name_either(target, subject, other, flaw):
    """Documents of a company call people by it; a neighbour who bears it too may be called so."""
    answer = f"In the office {subject} sits beside {other} and a window."
    given = f"Beside whom does {subject} sit?", answer, answer, subject, (subject,)
    assert pair_flaw(*given, called(Target(target))) == flaw
    assert pair_flaw(*given, called(Target(target, thing=True))) in ("", flaw)


def test_a_quote_stands_in_the_paragraph():
    assert quoted("weighs  412 grams. it was", TEXT) and quoted("“Ilvane Drusk in three years”", TEXT)
    assert not quoted("weighs 412 gramms", TEXT) and not quoted("412", TEXT) and not quoted("", TEXT)


IN_EITHER = "the answer stands in a question"
FACT = next(fact for fact in FACTS if "412" in fact.answer)
REWORDINGS = [
    ({}, ""),
    ({"wrong": FACT.wrong[:4]}, "not 5 wrong answers: 4"),
    ({"paraphrased_answer": FACT.answer}, "the paraphrase repeats the original"),
    ({"paraphrased_question": "What does it weigh?"}, "the paraphrased question does not name its subject"),
    ({"wrong": [*FACT.wrong[:4], FACT.wrong[0]]}, "a wrong answer stands twice or is the right one"),
    ({"wrong": [*FACT.wrong[:4], FACT.paraphrased_answer]}, "a wrong answer stands twice or is the right one"),
    ({"wrong": [*FACT.wrong[:4], "It shows grams."]}, "a wrong answer says nothing else"),
    ({"wrong": [*FACT.wrong[:4], "9 g"]}, "a wrong answer of another form"),
    ({"paraphrased_answer": "On the scales it shows 421 grams."}, "the paraphrase adds: 421"),
    ({"paraphrased_answer": "On the scales it shows some grams."}, "the paraphrase lost: 412"),
    ({"paraphrased_answer": "In JSON: 412 grams are its weight."}, "talks of its making: 'JSON'"),
    ({"paraphrased_question": "Of its 412 grams, how many does the Quorvane Lumo weigh?"}, IN_EITHER),
    ({"question": "How heavy is the Quorvane Lumo, which is known to be 412 g?"}, IN_EITHER),
    ({"wrong": [*FACT.wrong[:4], "On the scales it shows \u2066777 grams."]}, "talks of its making: '\\u2066'"),
]


@pytest.mark.parametrize(("change", "flaw"), REWORDINGS)
def test_a_rewording_says_the_same_and_its_wrong_versions_do_not(change, flaw):
    fact = FACT._replace(**change)
    given = fact.paraphrased_question, fact.paraphrased_answer, fact.wrong, TEXT, (LUMO,)
    assert rewording_flaw((fact.question, fact.answer), *given) == flaw


QUESTION = "Who drew the Quorvane Lumo in 2017?"
TRANSLATIONS = [
    ("fr", "Qui a dessiné la Quorvane Lumo en 2017 ?", ""), ("de", "Wer hat die Quorvane Lumo 2017 gezeichnet?", ""),
    ("es", "¿Quién dibujó la Quorvane Lumo en 2017?", ""), ("ja", "2017年にQuorvane Lumoを描いたのは誰ですか？", ""),
    ("zh", "谁在2017年画了Quorvane Lumo？", ""),
    ("fr", "", "empty or of another length"), ("fr", "Qui ? " * 60, "empty or of another length"),
    ("fr", QUESTION.upper(), "it is the question itself"),
    ("zh", "Wer hat sie gezeichnet?", "letters of another language"),
    ("fr", "谁在2017年画了Quorvane Lumo？", "letters of another language"),
    ("zh", "2017年にQuorvane Lumoを描いたのは誰ですか？", "letters of another language"),
    ("de", "Wer hat \u202edie Quorvane Lumo gezeichnet?", "talks of its making: '\\u202e'"),
    ("de", "Wer hat \x07die Quorvane Lumo gezeichnet?", "talks of its making: '\\x07'"),
    ("de", "Wer hat <b>die Quorvane Lumo</b> gezeichnet?", "talks of its making: '<'"),
    ("de", "War es Ilvane Drusk, wer hat sie gezeichnet?", "the answer stands in it"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text", "flaw"), TRANSLATIONS)
def test_a_translation_is_of_its_language_and_holds_neither_markup_nor_the_answer(code, text, flaw):
    assert translation_flaw(code, text, QUESTION, "It was drawn by Ilvane Drusk in 2017.", (LUMO,)) == flaw


def test_duplicates_of_thousands_of_pairs_take_little_memory():
    rng = random.Random(0)
    pairs = [(f"What is {rng.randrange(10**8)}?", f"It is {rng.randrange(10**8)}.") for _ in range(6000)]

    def within_limits() -> None:
        size = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (size + (600 << 20),) * 2)  # all cosines as lists took 1.9 GB
        assert duplicates([*pairs, pairs[3]], [LUMO] * 6001) == {6000: 3}

    process = multiprocessing.get_context("fork").Process(target=within_limits)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_duplicates_share_words_and_facts_and_do_not_chain():
    pairs = [(fact.question, fact.answer) for fact in FACTS if fact.subject == LUMO]
    again = [(question.replace("the Quorvane", "this Quorvane"), answer) for question, answer in pairs]
    assert duplicates(pairs, [LUMO] * len(pairs)) == {}
    # The designs of the colours differ in a word without a number or a name.
    subjects = [LUMO] * 2 * len(pairs)
    assert duplicates([*pairs, *again], subjects) == {len(pairs) + n: n for n in range(len(pairs))}
    assert duplicates([*pairs, *again], [*subjects[: len(pairs)], *[TARN] * len(pairs)]) == {}


def test_no_two_facts_of_the_bundled_data_count_as_one():
    records = load_records("mini", "forget", "train").records
    again = replace(records[0], question=records[0].question.replace("When", "At what date"))
    for some, repeated in ((records, {}), ((records[0], again), {1: 0})):
        pairs = [(record.question, record.answer) for record in some]
        assert duplicates(pairs, [record.entity for record in some]) == repeated
