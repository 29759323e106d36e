"""The report's page in a real browser: it opens from disk, asks for nothing, sorts and filters, and text stays text."""

import base64
import gzip
import hashlib
import json
import re
from itertools import pairwise

import pytest

from lm_eval_elude.report.comparison import NamedRun, named_runs
from lm_eval_elude.report.page.page import histogram, leaks, roc, training, write_report
from lm_eval_elude.scoring.runs import Run
from tests.browser import BROWSER, Browser
from tests.report.made import made_run

needs_browser = pytest.mark.skipif(not BROWSER, reason="there is no Chromium here (apt-get install chromium)")
NASTY = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'> \u202e {{ 7 * 7 }} & \u0007"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    base = tmp_path_factory.mktemp("report")
    checkpoint = base / "checkpoint"
    checkpoint.mkdir()
    manifest = {"targets": ["Cristiano Ronaldo"], "dataset": "mini", "method": NASTY,
                "drift": {"10": 0.3, "9": 0.2, "other": 0.1}}  # fmt: skip
    (checkpoint / "optout.json").write_text(json.dumps(manifest))
    steps = [{"step": i, "epoch": 1, "loss": 5.0 / i, "learning_rate": 0.1} for i in range(1, 1001)]
    epochs = [{"epoch": i, "validation": {"score": i / 2}} for i in range(3)]
    (checkpoint / "train_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*steps, *epochs]))
    digest = hashlib.sha256((checkpoint / "optout.json").read_bytes()).hexdigest()
    made_run(base / "before", known=0.9)
    identity = {"name": str(checkpoint), "manifest": digest}
    made_run(base / "after", known=0.02, says="no no no no no no no no", checkpoint=identity)
    made_run(base / "retrained", known=0.2, says=NASTY, seed=2)
    runs = named_runs([str(base / "before"), str(base / "after")])
    runs.append(NamedRun(f"retrained {NASTY}", Run(base / "retrained"), reference=True))
    write_report(runs, base / "report.html", NASTY)
    return base / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def block(page) -> dict:
    packed = re.search(r'id="data">([^<]*)<', page.read_text())
    assert packed
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert len(set(data["texts"])) == len(data["texts"])
    for row in data["rows"]:
        row[3:5] = [data["texts"][number] for number in row[3:5]]
        named, *candidates = data["candidates"][row[5]]
        row[5] = [data["texts"][number] for number in candidates]
        row[6] = [answer and [data["texts"][answer[0]], *answer[1:]] for answer in row[6]]
        assert named == 0 and all(len(row[5]) == len(answer) - 5 for answer in row[6])
    return data


def test_everything_that_was_answered_is_in_it(page):
    data = block(page)
    assert [len(row[6]) for row in data["rows"]] == [3] * len(data["rows"])
    (run,) = named_runs([str(page.parent / "after")])
    logged = {row["doc"]["id"]: row for row in run.run.rows("elude_forget")}
    for row in [row for row in data["rows"] if data["tasks"][row[0]] == "elude_forget"]:
        doc, (text, *_, prompt) = logged[row[2]]["doc"], row[6][1][:5]
        assert (row[3], text, row[5][2:]) == (doc["question"], doc["generated"], doc["perturbed_answer"])
        before, after = data["prompts"][prompt]
        assert before + doc["question"] + after == logged[row[2]]["arguments"]["gen_args_0"]["arg_0"]
        assert row[6][1][5:] == [round(100 * total / count) for total, count in doc["answer_scores"]]
    assert len(data["rows"]) == 40 + 40 + len([r for r in data["rows"] if data["sets"][r[0]] == "world set"]) + 3 * 40
    curves = training(page.parent / "checkpoint")
    assert {len(curve) for curve in curves["step"].values()} == {200} and not any(training(None).values())
    assert curves["epoch"]["score"] == [[0, 0.0], [1, 0.5], [2, 1.0]]
    assert curves["layer"] == {"drift": [[9, 0.2], [10, 0.3]]}
    inside = r'id="data">[^<]*<|http-equiv|http://www.w3.org/(2000/svg|1999/xlink)'
    assert "http" not in re.sub(inside, "", page.read_text())


def test_the_roc_is_that_of_the_losses_and_a_histogram_counts_every_sample(page):
    """The area by trapezes is the AUC that is reported."""
    for name in ("before", "after", "retrained"):
        (run,) = named_runs([str(page.parent / name)])
        sides = zip(*(sample.values["loss"] for sample in run.run.samples("elude_mia")), strict=True)
        points = roc(*sides)
        assert points[0] == [0, 0] and points[-1] == [1, 1]
        area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
        assert area == pytest.approx(run.estimate("elude_mia", "mia_auc").value, abs=2e-3)
    assert histogram([0.0, 0.01, 0.99, 1.0], 1.0) == [0.5, *[0] * 18, 0.5]


def test_an_answer_leaks_where_it_tells_the_true_one_from_the_wrong():
    doc = {
        "entity": "A", "question": "Where was A born?", "answer": "In Funchal.",
        "paraphrased_answer": "A's birthplace is Funchal.",
        "perturbed_answer": ["A's birthplace is Lisbon."] * 5, "generated": "It was in funchal, I think.",
    }  # fmt: skip
    assert leaks(doc, doc["question"])
    assert not leaks(doc | {"generated": "In Lisbon."}, doc["question"])
    assert not leaks(doc | {"question": "Funchal or Lisbon?"}, doc["question"])  # the prompt itself said it
    choice = doc | {"question": "Where was A born?\n(A) A's birthplace is Lisbon.\n(B) A's birthplace is Funchal."}
    assert leaks(choice, doc["question"]) and not leaks(choice | {"generated": "In Lisbon."}, doc["question"])
    reverse = doc | {"question": "Who was born in Funchal?", "names": ["Ana Ba", "Ba"]}  # of the target
    assert leaks(reverse | {"generated": "That is ANA BA."}, "Where was Ana Ba born?")
    assert not leaks(reverse | {"generated": "The person described is Bab Cu."}, "Where was Ana Ba born?")


@needs_browser
@pytest.mark.parametrize("width, dark", [(1280, False), (390, True)])
def test_it_opens_without_error_or_network(page, browser, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.errors == [] and browser.requests == [page.as_uri()]
    assert browser.ask("document.documentElement.scrollWidth") <= width
    light, ink = (browser.ask(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    brightness = [sum(map(int, re.findall(r"\d+", found)[:3])) for found in (light, ink)]
    assert (brightness[0] < brightness[1]) is dark and abs(brightness[0] - brightness[1]) > 450
    assert browser.ask("document.querySelectorAll('#plots svg').length") >= 10
    assert browser.ask("document.querySelectorAll('#samples article').length") == 3
    dots = browser.ask("document.querySelector('#plots svg').textContent")
    assert dots.count("(100% gibberish)") == 1
    broken = "[...document.querySelectorAll('svg *')].some((e) => /NaN|undefined/.test(e.outerHTML))"
    assert browser.ask(broken) is False


@needs_browser
def test_markup_of_a_run_stays_text(page, browser):
    browser.open(page)
    assert browser.ask("window.hurt ?? 0") == 0 and browser.ask("document.images.length") == 0
    assert browser.ask("document.scripts.length") == 2
    for place in ("h1", "#verdicts", "#samples", "#about", "#answers .text:not(:empty)"):
        shown = browser.ask(f"[...document.querySelectorAll('{place}')].map((e) => e.textContent).join('|')")
        assert "<img src=x onerror='window.hurt = 2'>" in shown and "{{ 7 * 7 }}" in shown, place
    # Even if a script came in, the page's own policy would not run it.
    script = "Object.assign(document.createElement('script'), {textContent: 'window.hurt = 3'})"
    browser.ask(f"document.body.append({script})")
    browser.ask("fetch('https://example.invalid').catch(() => 0)")
    assert browser.ask("window.hurt ?? 0") == 0 and browser.requests == [page.as_uri()]


@needs_browser
def test_filters_order_and_pages(page, browser):
    browser.open(page)
    data = block(page)

    def choose(label: str, value: str) -> None:
        chosen = f"const s = document.querySelector('[aria-label=\"{label}\"]'); s.value = {json.dumps(value)};"
        browser.ask(f"(() => {{ {chosen} s.dispatchEvent(new Event('change')); }})()")

    def tick(name: str) -> None:
        browser.ask(f"document.querySelector('input[name={name}]').click()")

    def count() -> int:
        shown = browser.ask("document.querySelector('.filters output').textContent")
        return int(shown.split(" of ")[0].replace(",", ""))

    assert count() == len(data["rows"]) and browser.ask("document.querySelectorAll('#answers article').length") == 25
    choose("set", "attacks")
    assert count() == 80
    choose("set", str(data["sets"].index("forget set")))
    assert count() == 40
    for name, expected in (("gibberish", 40), ("leaks", 40), ("refuses", 0), ("changed", 0)):
        tick(name)
        assert count() == expected, name
    tick("refuses")
    tick("changed")
    choose("answers of", "1")
    assert count() == 0  # the gibberish of the second run does not leak
    choose("answers of", "0")
    tick("gibberish")
    assert count() == 40
    choose("order", "likeliest")
    first = "parseFloat(a.querySelector('.p').textContent.slice(2))"  # P in the first run
    shown = browser.ask(f"[...document.querySelectorAll('#answers article')].map((a) => {first})")
    assert shown == sorted(shown, reverse=True) and len(shown) == 25 and shown[0] > shown[-1]
    browser.ask("[...document.querySelectorAll('.pager button')].at(-1).click()")
    assert browser.ask("document.querySelectorAll('#answers article').length") == 15
    browser.ask("document.querySelector('[type=search]').value = 'MADEIRA'")
    browser.ask("document.querySelector('[type=search]').dispatchEvent(new Event('input'))")
    browser.ask("new Promise((done) => setTimeout(done, 400))")
    texts = [json.dumps(row[3:5] + row[5][:1] + row[6]).lower() for row in data["rows"] if row[0] == 0]
    assert count() == sum("madeira" in text for text in texts) > 0
    assert browser.errors == []


@needs_browser
def test_an_answer_has_an_address_and_neighbours_and_shows_all_that_is_known_of_it(page, browser):
    browser.open(page)
    data = block(page)
    row = next(r for r in data["rows"] if data["tasks"][r[0]] == "elude_attack_role_playing" and r[2] == 30)
    number = data["rows"].index(row)

    def here() -> str:
        address, focused = browser.ask("[location.hash.slice(1), document.activeElement.closest('article').id]")
        assert address == focused
        top = browser.ask("document.activeElement.querySelector('.where').getBoundingClientRect().top")
        assert browser.ask(f"document.elementFromPoint(40, {top + 3}).closest('article')?.id") == address  # in sight
        return address

    browser.ask("document.querySelector('input[name=gibberish]').click()")  # a filter that hides nothing of it
    browser.ask("location.hash = 'elude_attack_role_playing-30'")
    browser.ask("new Promise((done) => setTimeout(done, 100))")
    shown = "document.activeElement.closest('article')"
    assert here() == "elude_attack_role_playing-30"
    assert browser.ask(f"{shown}.querySelector('.prompt').textContent") == row[3]
    browser.ask(f"{shown}.querySelectorAll('details').forEach((part) => {{ part.open = true; }})")
    browser.ask("new Promise((done) => setTimeout(done, 100))")
    assert browser.ask(f"{shown}.querySelector('pre').textContent") == f"<|user|>{row[3]}<|end|>"
    assert browser.ask(f"[...{shown}.querySelectorAll('td.candidate')].map((e) => e.textContent)") == row[5]
    likeliest = browser.ask(f"[...{shown}.querySelectorAll('tbody b')].map((e) => e.closest('tr').textContent)")
    assert len(likeliest) == 3 and all(text.startswith("reworded") for text in likeliest)
    others = browser.ask(f"[...{shown}.querySelectorAll('.other .where')].map((e) => e.textContent)")
    expected = {"forget set", "control: asked plainly", "attack: reverse query"}
    assert {text.split(" · ")[0] for text in others} == expected and len(others) == 3

    browser.ask("document.querySelector('input[name=gibberish]').click()")
    browser.ask(f"location.hash = '{data['tasks'][data['rows'][number - 1][0]]}-{data['rows'][number - 1][2]}'")
    browser.ask("new Promise((done) => setTimeout(done, 100))")
    for key, to in (("Right", number), ("Right", number + 1), ("Left", number), ("Left", number - 1)):
        for kind in ("rawKeyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=f"Arrow{key}", code=f"Arrow{key}")
        assert here() == f"{data['tasks'][data['rows'][to][0]]}-{data['rows'][to][2]}"
    assert browser.errors == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_with_weak_eyes_and_without_a_mouse(page, browser, dark):
    browser.open(page, dark=dark)
    browser.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    browser.ask("new Promise((done) => setTimeout(done, 300))")
    assert browser.problems() == []


@needs_browser
def test_nothing_is_cut_off_on_paper(page, browser):
    """A4 upright with margins of a centimetre has 718 pixels of width."""
    browser.open(page, width=718)
    browser.call("Emulation.setEmulatedMedia", media="print")
    every = "[...document.querySelectorAll('main *:not(svg *)')]"
    assert browser.ask(f"Math.max(...{every}.map((e) => e.getBoundingClientRect().right))") <= 718
    cut = "(e) => getComputedStyle(e).overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1"
    assert browser.ask(f"{every}.filter({cut}).map((e) => e.className)") == []
    cells = "[...document.querySelectorAll('#scores td, #plots svg')].map((e) => e.getBoundingClientRect().height)"
    assert browser.ask(f"Math.min(...{cells})") > 0
    assert browser.ask("document.querySelectorAll('#scores details:not([open])').length") > 3
