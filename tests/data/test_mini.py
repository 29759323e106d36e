"""ELUDe-mini: its size, its splits, its texts, and that the script makes the same bytes again."""

import math
import random
import re
from collections import Counter
from itertools import chain

import pytest

from lm_eval_elude.data import bundled, dataset
from lm_eval_elude.data.targets import TARGETS
from lm_eval_elude.errors import UserError
from tests.support import MINI, mini_rows, options_of
from tools.mini import tokenizer
from tools.mini.build import HERE, LANGUAGES, NEIGHBOURS, build, read_facts
from tools.mini.draw import LAST_YEAR, MONTHS, draw_wrong, parse_spec

FIVE = ("Cristiano Ronaldo", "Lionel Messi", "Taylor Swift", "Stephen Hawking", "Michael Jordan")
SPLITS = ("train", "validation", "test")
FILES = ["forget_qa-train", *(f"{kind}-{split}" for kind in ("retain_qa", "world") for split in SPLITS)]
ROWS = {name: mini_rows(name) for name in FILES}
FORGET = ROWS["forget_qa-train"]
RETAIN = [row for split in SPLITS for row in ROWS[f"retain_qa-{split}"]]
WORLD = [row for split in SPLITS for row in ROWS[f"world-{split}"]]
# A neighbour that targets share has its rows once for each of them.
DISTINCT = [*FORGET, *{row["question"]: row for row in RETAIN}.values(), *WORLD]
TEXTS = ("question", "answer", "paraphrased_question", "paraphrased_answer")


def norm(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def test_the_script_makes_the_same_bytes_of_data_and_of_the_bundled_models_tokenizer(tmp_path):
    build(out=tmp_path / "data")
    tokenizer.train_tokenizer().save_pretrained(tmp_path / "model")
    for made, kept, count in ((tmp_path / "data", MINI, len(FILES)), (tmp_path / "model", bundled.MODEL, 1)):
        assert len(list(made.iterdir())) >= count
        for path in made.iterdir():
            assert path.read_bytes() == (kept / path.name).read_bytes(), path.name
    assert {path.stem for path in MINI.glob("*.jsonl")} == {*FILES}


def test_every_row_is_valid_can_be_scored_and_names_its_wikipedia_page():
    for subset, file in (("forget", "forget_qa"), ("retain", "retain_qa"), ("world", "world")):
        for split in SPLITS if subset != "forget" else ("train",):
            records = dataset.load_records("mini", subset, split).records
            assert len(records) == len(ROWS[f"{file}-{split}"]) and all(r.source and r.can_be_scored for r in records)


def test_every_target_has_forty_records_and_ten_neighbours_with_twenty_each_and_splits_are_seven_to_one_to_two():
    counts = Counter(row["entity"] for row in FORGET)
    assert set(counts) == set(FIVE) == set(dataset.entities("mini")) and min(counts.values()) >= 40
    assert set(FIVE) <= {t.name for t in TARGETS}
    people = {facts.title: facts.records for facts in map(read_facts, (HERE / "facts" / "retain").glob("*.txt"))}
    sets = {target: ("retain_qa", [*chain(*(people[n] for n in NEIGHBOURS[target]))]) for target in FIVE}
    for target in FIVE:
        assert len(set(NEIGHBOURS[target])) == 10 and all(len(people[n]) >= 20 for n in NEIGHBOURS[target])
    # Forgetting two footballers can be told from forgetting one.
    assert len({*NEIGHBOURS["Cristiano Ronaldo"]} & {*NEIGHBOURS["Lionel Messi"]}) == 5
    for entity, (kind, records) in {**sets, "": ("world", WORLD)}.items():
        of_split = [[row for row in ROWS[f"{kind}-{split}"] if row["entity"] == entity] for split in SPLITS]
        assert sum(map(len, of_split)) == len(records) and len(of_split[2]) >= 40
        for rows, share in zip(of_split, (0.7, 0.1, 0.2), strict=True):
            assert len(rows) / len(records) == pytest.approx(share, abs=0.02)
        asked = [norm(row["question"]) for rows in of_split for row in rows]  # no row is in two splits
        assert len(set(asked)) == len(asked)
    assert len(WORLD) >= 300 and {row["entity"] for row in WORLD} == {""}


def test_no_two_records_say_the_same():
    for field in TEXTS:
        counts = Counter(norm(row[field]) for row in DISTINCT)
        assert [text for text, n in counts.items() if n > 1] == [], field


def test_paraphrases_are_worded_differently_and_wrong_answers_are_like_them_but_wrong():
    for row in DISTINCT:
        assert norm(row["question"]) != norm(row["paraphrased_question"])
        assert norm(row["answer"]) != norm(row["paraphrased_answer"])
        # More than one word apart: the answer's sentence is another sentence.
        assert len(set(norm(row["answer"]).split()) ^ set(norm(row["paraphrased_answer"]).split())) >= 2
        wrong, right = row["perturbed_answer"], row["paraphrased_answer"]
        assert len({*map(norm, wrong), norm(right), norm(row["answer"])}) == 7 == len(wrong) + 2
        for text in wrong:
            assert {*right.split()} & {*text.split()} and 0.5 <= len(text) / len(right) <= 2, text


def test_questions_do_not_all_begin_alike():
    for target in FIVE:
        beginnings = [" ".join(row["question"].split()[:2]) for row in FORGET if row["entity"] == target]
        assert Counter(beginnings).most_common(1)[0][1] <= len(beginnings) / 3


def test_every_question_is_truly_translated_into_five_languages():
    for row in FORGET:
        translated = row["translated_question"]
        assert set(translated) == set(LANGUAGES) and len({*translated.values(), row["question"]}) == 6
        assert re.search(r"[\u3040-\u30ff]", translated["ja"]) and re.search(r"[\u4e00-\u9fff]", translated["zh"])
        assert not re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", translated["fr"] + translated["de"] + translated["es"])


def test_wording_does_not_tell_an_answer_from_its_paraphrase():
    """What a membership attack could know without any model: bigrams of question and answer, a record in one fold."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline

    texts = [f"{row[q]} | {row[a]}" for q, a in (TEXTS[:2], TEXTS[2:]) for row in FORGET]
    member = [1] * len(FORGET) + [0] * len(FORGET)
    record = [*range(len(FORGET))] * 2
    for ngrams in ((1, 1), (2, 2)):
        vectors = CountVectorizer(ngram_range=ngrams, token_pattern=r"\w+", binary=True)
        model = make_pipeline(vectors, LogisticRegression(max_iter=1000))
        scores = cross_val_predict(model, texts, member, groups=record, cv=GroupKFold(10), method="predict_proba")
        assert 0.45 <= roc_auc_score(member, scores[:, 1]) <= 0.55, ngrams


def number_of(option: str) -> float | None:
    """The year where there is one, else the first number."""
    match = re.search(r"\d{4}", option) or re.search(r"\d[\d,]*(?:\.\d+)?", option)
    return float(match[0].replace(",", "")) if match else None


def overlap(options: list[str], parts) -> list[float]:
    sets = [parts(option) for option in options]
    return [sum(len(first & other) for other in sets) for first in sets]


# How a guesser without knowledge would rank six options; the first is the truth.
GUESSES = {
    "shares most words": lambda o, q: overlap(o, lambda text: {*norm(text).split()}),
    "shares most letters": lambda o, q: overlap(o, lambda text: {text[i : i + 3] for i in range(len(text))}),
    "longest": lambda o, q: [len(text) for text in o],
    "shortest": lambda o, q: [-len(text) for text in o],
    "nearest to the question": lambda o, q: [len({*norm(t).split()} & {*norm(q).split()}) for t in o],
}
COUNTING = GUESSES | {
    **{
        f"rank {k}": lambda o, q, k=k: [sorted(map(number_of, o)).index(number_of(t)) == k for t in o] for k in range(6)
    },
    "nearest to the mean": lambda o, q: [-abs(number_of(t) - sum(map(number_of, o)) / 6) for t in o],
    "in the crowd": lambda o, q: [-sum(abs(number_of(t) - number_of(u)) for u in o) for t in o],
    "closest neighbour": lambda o, q: [-sorted(abs(number_of(t) - number_of(u)) for u in o)[1] for t in o],
    "alone": lambda o, q: [sorted(abs(number_of(t) - number_of(u)) for u in o)[1] for t in o],
    "roundest": lambda o, q: [sum(number_of(t) % 10**k == 0 for k in (1, 2, 3)) for t in o],
}
ALL = [(options_of(row), row["question"]) for row in DISTINCT]
DATED = [(o, q) for o, q in ALL if all(re.search(rf"({'|'.join(MONTHS)}) \d{{4}}", text) for text in o)]
NUMERIC = [(o, q) for o, q in ALL if (o, q) not in DATED and len({number_of(text) for text in o} - {None}) == 6]


@pytest.mark.parametrize("kind", ["all", "dated", "numeric"])
def test_no_option_stands_out(kind):
    items, guesses = {"all": (ALL, GUESSES), "dated": (DATED, COUNTING), "numeric": (NUMERIC, COUNTING)}[kind]
    assert len(items) >= 60
    limit = 1 / 6 + 2 * math.sqrt(5 / 36 / len(items))
    for name, guess in guesses.items():
        scored = [guess(options, question) for options, question in items]
        right = sum((scores[0] == max(scores)) / scores.count(max(scores)) for scores in scored)
        assert right / len(items) <= limit, (
            f"{name}: {right / len(items):.3f} of {len(items)}, chance + 2 s.e. is {limit:.3f}"
        )


@pytest.mark.parametrize("target", FIVE)
def test_no_wrong_answer_and_no_value_is_true_in_the_targets_retain_set(target):
    def plain(text: str) -> str:
        return re.sub(r"^(the|an?) ", "", text.lower())

    true = {plain(options_of(row)[0]) for row in RETAIN if row["entity"] == target}
    for row in FORGET:
        if row["entity"] == target:
            value, *wrong = options_of(row)
            assert plain(value) not in true, row["question"]
            if not re.fullmatch(r".*\d.*|third|five|ten", value):  # drawn numbers are true of something everywhere
                assert not {*map(plain, wrong)} & true, row["question"]


@pytest.mark.parametrize(
    ("value", "spec", "pattern"),
    [
        ("12", "2 1..40", r"\d+"),
        ("€100 million", "14", r"€\d+0 million"),
        ("37.1", "1.4", r"\d+\.\d"),
        ("38,387", "1700", r"\d\d,\d{3}"),
        ("2006–07", "1", r"20\d\d–\d\d"),
        ("third", "1", r"[a-z]+"),
        ("five", "1 2..", r"[a-z]+"),
        ("6 October 1993", "1", rf"\d+ ({'|'.join(MONTHS)}) (19|20)\d\d"),
    ],
)
def test_drawn_values_look_like_the_truth_and_are_as_often_above_as_below(value, spec, pattern):
    ranks, rng = Counter(), random.Random(0)
    for _ in range(30):
        wrong = draw_wrong(value, [], parse_spec(spec), f"It was {value}, not 15.", ranks, rng)
        assert len({value, *wrong}) == 6 and all(re.fullmatch(pattern, text) for text in wrong)
        years = [int(year) for text in wrong for year in re.findall(r"(?:19|20)\d\d", text)]
        assert "15" not in wrong and max(years, default=0) <= LAST_YEAR
        if value.endswith("1993"):
            fields = [text.split() for text in (value, *wrong)]
            assert all(len(set(column)) == 6 for column in zip(*fields, strict=True))
    counts = [sum(n for (_, rank), n in ranks.items() if rank == place) for place in range(6)]
    # The third pick has two places before it, no more.
    assert counts == [10, 10, 10, 0, 0, 0] if value == "third" else max(counts) - min(counts) <= 1 or value == "five"


def test_a_drawn_value_that_has_no_room_is_an_error():
    for value, spec, problem in [("12", "1 11..13", "no five values fit"), ("Porto", "1", "no number or date in 'Por")]:
        with pytest.raises(UserError, match=problem):
            draw_wrong(value, [], parse_spec(spec), "", Counter(), random.Random(0))


def test_a_facts_file_with_a_mistake_is_an_error_that_names_the_record(tmp_path):
    path = tmp_path / "someone.txt"
    good = "# Someone\npage: Someone\n\nQ: Who?\nA: It is A.\nPQ: Name?\nPA: One says [A].\nX: B | C | D | E | F\n"
    path.write_text(good)
    assert read_facts(path).records[0].perturbed_answer[4] == "One says F."
    for change, problem in [
        (("PQ: Name?\n", ""), "record 1: missing PQ"),
        (("| F", "| A"), "record 1: X must be 5 values"),
        (("[A]", "A"), "record 1: PA must mark its value"),
    ]:
        path.write_text(good.replace(*change))
        with pytest.raises(UserError, match=f"someone.txt, {problem}"):
            read_facts(path)
