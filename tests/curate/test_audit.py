"""`elude audit`: rules on every row, a page that holds its data safely, and what several judges say together."""

import json
import re
from dataclasses import replace

import pytest

from lm_eval_elude.curate.audit import (
    CRITERIA,
    PAPER,
    Row,
    alpha,
    diversity,
    findings,
    merge,
    near_duplicates,
    page,
    rows_of,
)
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target
from lm_eval_elude.errors import UserError
from tests.curate.company import FACTS, TARGET
from tests.support import ROOT, elude, mini_rows, small_data, write_jsonl

LUMO = Target(TARGET, (), True)


def test_a_damaged_row_of_the_retain_set_is_no_missing_set(tmp_path):
    folder = small_data(tmp_path / "data", {"Cristiano Ronaldo": 3})
    assert {row.subset for row in rows_of(str(folder))} == {"forget", "retain"}
    file = folder / "retain_qa-test.jsonl"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(first) | {"answer": None}), *rest]))
    with pytest.raises(UserError, match=r"retain_qa-test.jsonl, row 1"):
        rows_of(str(folder))
    file.unlink()
    assert {row.subset for row in rows_of(str(folder))} == {"forget"}


def rows() -> list[Row]:
    about_lumo = [fact for fact in FACTS if fact.subject == TARGET]
    return [
        Row("forget", "train", number, QARecord(TARGET, fact.question, fact.answer, fact.paraphrased_question,
            fact.paraphrased_answer, tuple(fact.wrong), subject=TARGET), f"Indeed: {fact.answer}")
        for number, fact in enumerate(about_lumo, 1)
    ]  # fmt: skip


def test_a_double_first_name_names_its_subject():
    record = QARecord(TARGET, "When did Jean-Luc join?", "It was in 2011 that he joined.")
    assert findings([Row("retain", "test", 1, record)], [LUMO]) == []


def test_good_rows_have_no_findings_and_each_flaw_has_one():
    good = rows()
    assert findings(good, [LUMO]) == [] == near_duplicates(good)
    first = good[0].record
    flaws = {
        "the question does not name its subject": replace(first, question="When was it released?"),
        "not in the paragraph: 2018": replace(first, answer="The Quorvane Lumo was released in March 2018."),
        "a wrong answer stands twice or is the right one":
            replace(first, perturbed_answer=(*first.perturbed_answer[:4], first.paraphrased_answer)),
        "the paraphrase repeats the original": replace(first, paraphrased_answer=first.answer),
    }  # fmt: skip
    for reason, record in flaws.items():
        (finding,) = findings([good[0]._replace(record=record)], [LUMO])
        assert finding.reason == reason
    twice = good[1]._replace(subset="retain", split="test", record=replace(good[0].record))
    reasons = [finding.reason for finding in findings([good[0], twice], [LUMO])]
    assert any(reason.startswith("a question that stands twice: also in forget_qa-train, row 1") for reason in reasons)
    again = good[0]._replace(number=9, record=replace(first, question=first.question.replace("When", "In what month")))
    assert [f.where for f in near_duplicates([*good, again])] == ["forget_qa-train, row 9"]


def test_questions_without_a_word_have_a_place_on_the_page():
    one, two, *more = rows()
    bare = [row._replace(record=replace(row.record, question=q)) for row, q in ((one, "--!"), (two, "...?"))]
    assert "...?" in page("/somewhere/my-lumo", [*bare, *more], 20, 7)


def test_diversity_falls_where_rows_repeat():
    records = [row.record for row in rows()]
    once, thrice = diversity(records), diversity(records * 3)
    assert once.distinct == 1 and thrice.distinct == pytest.approx(1 / 3) and thrice.bigrams < once.bigrams / 2


def test_the_page_holds_a_seeded_sample_and_no_markup_of_its_rows():
    bad = [row._replace(paragraph="</script><img src=x onerror=alert(1)>") for row in rows()]
    text = page("/somewhere/my-lumo", bad, 3, 7)
    assert text == page("/somewhere/my-lumo", bad, 3, 7) != page("/somewhere/my-lumo", bad, 3, 8)
    assert "<img" not in text and "/somewhere" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert len(data["items"]) == 3 and data["items"][0]["paragraph"] == bad[0].paragraph
    assert "http" not in text.replace("http-equiv", "")


def exported(tmp_path, name: str, judged: dict[str, list[bool | None]], **change):
    items = [
        {"id": f"forget_qa-train, row {n}", "set": "forget",
         "judged": {c: judged[c][n] for c in CRITERIA if judged[c][n] is not None}}
        for n in range(len(judged["relevance"]))
    ]  # fmt: skip
    table = {"format": "elude-audit-1", "fingerprint": "f", "seed": 0, "size": 4, "judge": name, "items": items}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(table | change))
    return path


def test_judges_are_merged_with_intervals_and_agreement(tmp_path):
    first = {"relevance": [True, True, True, False], "diversity": [True] * 4, "factuality": [True, False, True, False]}
    second = {"relevance": [True, True, True, False], "diversity": [True] * 4, "factuality": [False, True, False, None]}
    results = {r.criterion: r for r in merge([exported(tmp_path, "a", first), exported(tmp_path, "b", second)])}
    assert results["relevance"].share == 0.75 and results["relevance"].alpha == pytest.approx(1)
    assert results["diversity"].share == 1 and results["diversity"].alpha == 1
    # By hand: three items judged twice, all disagreeing, values 3 x yes, 3 x no: 1 - 1 / (18 / 30) = -2/3.
    assert results["factuality"].alpha == pytest.approx(-2 / 3)
    assert results["factuality"].share == pytest.approx((0.5 * 3 + 0) / 4) and results["factuality"].items == 4
    assert all(result.low <= result.share <= result.high for result in results.values())
    assert merge([exported(tmp_path, "c", first)])[0].alpha is None
    # Wilson's interval of 3 of 4, as tables have it.
    assert results["relevance"][3:5] == pytest.approx((0.3006, 0.9544), abs=1e-4)
    assert alpha([[True, None], [None, True]]) is None
    with pytest.raises(UserError, match="seed is 1, but"):
        merge([exported(tmp_path, "a", first), exported(tmp_path, "d", first, seed=1)])
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UserError, match="not what the page"):
        merge([tmp_path / "x.json"])
    items = json.loads((tmp_path / "a.json").read_text())["items"]
    for change, said in (
        ([*items, items[0]], "an id stands twice in it"),
        ([items[0] | {"set": "retain"}], "row 0 is of set 'retain', and of 'forget' elsewhere"),
        ([items[0] | {"judged": {"quality": True}}], "is judged by 'quality'; criteria are relevance"),
    ):
        with pytest.raises(UserError, match=said):
            merge([tmp_path / "a.json", exported(tmp_path, "e", first, items=change)])
    with pytest.raises(UserError, match="nothing is judged yet"):
        merge([exported(tmp_path, "e", first, items=[items[0] | {"judged": {}}])])
    idle = elude("audit", "--merge", tmp_path / "a.json", "--sample", 3)
    assert idle.code == 2 and "--sample: does nothing with --merge" in idle.err
    done = elude("audit", "--merge", tmp_path / "a.json", tmp_path / "b.json")
    assert done.code == 0 and "75.0%" in done.out and f"{PAPER['forget'][0]:.1%}" in done.out


def test_the_bundled_data_pass_the_rules(tmp_path):
    done = elude("audit", "mini", "--out", tmp_path / "a.html", "--sample", 5)
    assert done.code == 0 and " rows, 0 findings by rule\n" in done.out, done
    assert (tmp_path / "a.html").stat().st_size > 5000
    rows = mini_rows("forget_qa-train", 2)
    for mine in (write_jsonl(tmp_path / "forget_qa-train.jsonl", rows), tmp_path / "a" / "forget_qa-train.json"):
        if not mine.exists():
            mine.parent.mkdir()
            mine.write_text(json.dumps(rows))
        _is_not_overwritten(mine)


def test_a_page_that_the_audit_did_not_write_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit.html").write_text("mine")
    assert (
        "not a page of `elude audit`" in elude("audit", "mini").err and (tmp_path / "audit.html").read_text() == "mine"
    )


def _is_not_overwritten(mine):
    before = mine.read_bytes()
    for command in (["audit", mine.parent], ["known", "--dataset", mine, "--model", "nowhere"]):
        done = elude(*command, "--out", mine)
        assert done.code == 2 and "is read by this command" in done.err and mine.read_bytes() == before


def test_what_was_judged_of_elude_mini_is_of_its_rows_of_today_or_the_page_says_that_it_is_not():
    files = sorted((ROOT / "docs" / "audit").glob("*.json"))
    text = (ROOT / "docs" / "building.md").read_text()
    today = page("mini", rows_of("mini"), 100, 0)
    judged = {json.loads(path.read_text())["fingerprint"] for path in files}
    (fingerprint,) = judged
    assert (f'"fingerprint": "{fingerprint}"' in today) != ("the table is of the data before" in text)
    for row in merge(files):
        assert f"| {row.subset} | {row.criterion} | {row.share * 100:.1f} % |" in text
