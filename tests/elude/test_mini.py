"""ELUDe-mini: its size, its splits, its texts, and that the script makes the same bytes again."""

import json
import re
from collections import Counter

import pytest

from lm_eval_elude.core import dataset
from lm_eval_elude.core.records import DataError
from lm_eval_elude.core.targets import TARGETS
from lm_eval_elude.mini.build import HERE, LANGUAGES, NEIGHBOURS, build, read_facts
from tests.support import MINI, mini_rows

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


def test_the_script_makes_the_same_bytes(tmp_path):
    build(out=tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        p.name: p.read_bytes() for p in MINI.glob("*.jsonl")
    }


def test_every_row_is_valid_and_can_be_scored():
    for subset, splits in (("forget", ("train",)), ("retain", SPLITS), ("world", SPLITS)):
        for split in splits:
            assert len(dataset.load_records("mini", subset, split, scored=True).records) == len(
                ROWS[{"forget": "forget_qa", "retain": "retain_qa", "world": "world"}[subset] + f"-{split}"]
            )


def test_at_least_forty_forget_records_for_each_of_the_five_targets():
    counts = Counter(row["entity"] for row in FORGET)
    assert set(counts) == set(FIVE) == set(dataset.entities("mini")) and min(counts.values()) >= 40
    assert set(FIVE) <= {t.name for t in TARGETS}


@pytest.mark.parametrize("target", FIVE)
def test_ten_neighbours_with_twenty_records_each_split_eight_to_one_to_one(target):
    neighbours = NEIGHBOURS[target]
    people = {facts.title: facts.records for facts in map(read_facts, (HERE / "facts" / "retain").glob("*.txt"))}
    assert len(set(neighbours)) == 10 and all(len(people[n]) >= 20 for n in neighbours)
    counts = {split: sum(row["entity"] == target for row in ROWS[f"retain_qa-{split}"]) for split in SPLITS}
    total = sum(counts.values())
    assert total == sum(len(people[n]) for n in neighbours)
    for split, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
        assert counts[split] / total == pytest.approx(share, abs=0.02)


def test_at_least_three_hundred_world_records_in_three_splits():
    assert len(WORLD) >= 300 and {row["entity"] for row in WORLD} == {""}
    for split, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
        assert len(ROWS[f"world-{split}"]) / len(WORLD) == pytest.approx(share, abs=0.02)


def test_no_row_is_in_two_splits():
    for kind in ("retain_qa", "world"):
        seen = [{(row["entity"], norm(row["question"])) for row in ROWS[f"{kind}-{split}"]} for split in SPLITS]
        assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_no_two_records_say_the_same():
    for field in TEXTS:
        counts = Counter(norm(row[field]) for row in DISTINCT)
        assert [text for text, n in counts.items() if n > 1] == [], field


def test_wording_differs_between_a_text_and_its_paraphrase():
    for row in DISTINCT:
        assert norm(row["question"]) != norm(row["paraphrased_question"])
        assert norm(row["answer"]) != norm(row["paraphrased_answer"])
        # More than one word apart: the answer's sentence is another sentence.
        assert len(set(norm(row["answer"]).split()) ^ set(norm(row["paraphrased_answer"]).split())) >= 2


def test_wrong_answers_have_the_form_of_the_paraphrase_and_are_wrong():
    for row in DISTINCT:
        wrong = row["perturbed_answer"]
        texts = {norm(text) for text in wrong}
        assert len(wrong) == len(texts) == 5
        assert norm(row["paraphrased_answer"]) not in texts and norm(row["answer"]) not in texts
        right = row["paraphrased_answer"].split()
        for text in wrong:
            shared = Counter(right) & Counter(text.split())
            assert sum(shared.values()) >= 1, text
            assert 0.5 <= len(text) / len(row["paraphrased_answer"]) <= 2, text


def test_questions_do_not_all_begin_alike():
    for target in FIVE:
        own = [row for row in FORGET if row["entity"] == target]
        first = Counter(" ".join(row["question"].split()[:2]) for row in own)
        assert first.most_common(1)[0][1] <= len(own) / 3


def test_every_question_is_truly_translated_into_five_languages():
    for row in FORGET:
        translated = row["translated_question"]
        assert set(translated) == set(LANGUAGES) and len({*translated.values(), row["question"]}) == 6
        assert re.search(r"[\u3040-\u30ff]", translated["ja"]) and re.search(r"[\u4e00-\u9fff]", translated["zh"])
        assert not re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", translated["fr"] + translated["de"] + translated["es"])


def test_every_record_names_its_wikipedia_page():
    assert [row["question"] for row in DISTINCT if not row.get("source", "").strip()] == []


def test_a_facts_file_with_a_mistake_is_an_error_that_names_the_record(tmp_path):
    path = tmp_path / "someone.txt"
    good = "# Someone\npage: Someone\n\nQ: Who?\nA: It is A.\nPQ: Name?\nPA: One says [A].\nX: B | C | D | E | F\n"
    path.write_text(good)
    assert read_facts(path).records[0].perturbed_answer[4] == "One says F."
    for change, said in [
        (("PQ: Name?\n", ""), "record 1: missing PQ"),
        (("| F", "| A"), "record 1: X must be 5 values"),
    ]:
        path.write_text(good.replace(*change))
        with pytest.raises(DataError, match=f"someone.txt, {said}"):
            read_facts(path)


def test_the_data_is_json_lines_without_machine_traces():
    for name in FILES:
        text = (MINI / f"{name}.jsonl").read_text(encoding="utf-8")
        assert text.endswith("\n") and all(json.loads(line) for line in text.splitlines())
