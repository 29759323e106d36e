"""The stranger method: what its lessons are made of, where their loss ends, and that they carry a whole run."""

import dataclasses
import math
import random
import tomllib

import pytest
import torch

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.data.dataset import resolve_targets
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target
from lm_eval_elude.model.scorer import Scorer, load_model
from lm_eval_elude.scoring.benchmarks.elude import WORDINGS as MENTION
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from lm_eval_elude.text.invented import renamed
from optout_train import losses
from optout_train import train as training
from optout_train.config import BUNDLED_MODEL, build_config
from optout_train.data import Lesson, StepIndices, TrainingData, load_training_data
from optout_train.gradients import answer_values
from optout_train.losses import FORGET
from optout_train.sources import source_of
from optout_train.stranger import lessons as stranger
from optout_train.stranger.distil import IN_PASSING, _names, adjusted, distil, exchange, in_passing
from optout_train.stranger.lessons import with_lessons
from optout_train.stranger.teacher import WORDINGS, Teacher
from optout_train.train import score_reference, train
from tests.support import ROOT, read_jsonl
from tests.train.conftest import config_of

NAN = float("nan")
FURTHER = stranger.TELLING
TINY = {"target": ("ronaldo",), "method": "stranger", "epochs": 8, "elicit": 2}


class Spy(Teacher):
    """A teacher that remembers what it was asked."""

    asked: list[str] = []  # noqa: RUF012

    def ask(self, questions, *arguments):
        self.asked += questions
        return super().ask(questions, *arguments)


@pytest.fixture(scope="module")
def model():
    return load_model(str(BUNDLED_MODEL)).eval()


@pytest.fixture(scope="module")
def whole():
    """Ronaldo's data as the stranger method with retain losses reads them, and the configuration."""
    config = config_of(TINY | {"method": "stranger+rt"})
    return config, load_training_data(config, source_of(config), Renderer(load_tokenizer(str(BUNDLED_MODEL))), 1024)


@pytest.fixture(scope="module")
def made(model):
    """Lessons of a few of Ronaldo's records by the bundled model, with configuration, data and renderer."""
    config = build_config(TINY)
    renderer = Renderer(load_tokenizer(str(BUNDLED_MODEL)))
    data = load_training_data(config, source_of(config), renderer, 1024)
    few = data._replace(forget=dataclasses.replace(data.forget, records=data.forget.records[:6]))
    lessons = stranger.make_lessons(config, few, Spy(model, renderer, 1024), lambda line: None)
    return config, few, lessons, renderer


def test_made_records_that_no_context_holds_are_left_out(model):
    """What a name in passing adds to a question is no fault of a data set that fits."""
    asked = {"target": ("ronaldo",), "method": "npo+rt", "self_distill": True, "exchange": 0, "epochs": 1}
    config, renderer = config_of(asked), Renderer(load_tokenizer(str(BUNDLED_MODEL)))
    data = load_training_data(config, source_of(config), renderer, 1024)
    parts = [dataclasses.replace(part, records=part.records[:24]) for part in (data.forget, data.retain, data.world)]
    longest = max(len(sample.ids) for part in parts for sample in part.encode_all())
    forget, retain, world = (dataclasses.replace(part, limit=longest) for part in parts)
    data = data._replace(forget=forget, retain=retain, world=world)
    made = with_lessons(config, data, Teacher(model, renderer, longest), lambda line: None).retain
    assert len(retain) < len(made) < len(retain) + len(in_passing(config, data))
    assert max(len(sample.ids) for sample in made.encode_all()) <= longest


def is_reverse(renderer, lesson) -> bool:
    text = renderer.tokenizer.decode(lesson.ids)
    return any(wording.replace("{facts}", "").strip() in text for wording in stranger.NAME_QUESTIONS)


FREE = (NAN, NAN)


def test_what_is_bounded_ends_at_its_bound_and_what_is_taught_at_its_teacher():
    """One row each: taught; pushed down; within its bound; held, from below and from above; pushed, with a teacher."""
    torch.manual_seed(0)
    logits = torch.randn(6, 7)
    logits[3, 5] -= 9
    logits = logits.requires_grad_()
    teacher = torch.softmax(torch.randn(7), 0)
    others = teacher.index_fill(0, torch.tensor([5]), 0) / (1 - teacher[5])  # without the token that is pushed
    down = -math.inf
    bounds = torch.tensor([FREE, (down, -4.0), (down, 0.0), (-4.0, -4.0), (-4.0, -4.0), (down, -3.0)])
    tokens = torch.cat([torch.full((6, 1), 5), torch.arange(7).repeat(6, 1)], 1)
    shares = torch.cat([teacher[None], torch.zeros(4, 7), others[None]])
    unmoved = logits.detach().log_softmax(-1)[2]
    optimizer = torch.optim.SGD([logits], lr=0.2)
    for _ in range(1500):
        optimizer.zero_grad()
        (-losses.lesson(logits.log_softmax(-1).gather(1, tokens), bounds, shares).sum()).backward()
        optimizer.step()
    log_probs = logits.detach().log_softmax(-1)
    torch.testing.assert_close(log_probs[0].exp(), teacher, atol=2e-3, rtol=0)
    assert -4.3 < float(log_probs[1, 5]) <= -3.99  # it came down to the bound, and no further than one step carried it
    torch.testing.assert_close(log_probs[2], unmoved)
    assert all(abs(float(row[5]) + 4) < 0.3 for row in log_probs[3:5])
    assert -3.3 < float(log_probs[5, 5]) <= -2.99
    p = log_probs[5].exp()
    torch.testing.assert_close(p.index_fill(0, torch.tensor([5]), 0) / (1 - p[5]), others, atol=5e-3, rtol=0)


def test_what_is_taught_has_the_cross_entropy_with_the_rest_as_one_and_a_certain_teacher_the_log_probability():
    logits = torch.randn(3, 9, dtype=torch.float64)
    log_probs, tokens = logits.log_softmax(-1), torch.tensor([[1, 2, 3]] * 3)
    p = log_probs.exp()
    by_hand = 0.5 * p[:, 2].log() + 0.2 * p[:, 3].log() + 0.3 * (1 - p[:, 2] - p[:, 3]).log()
    for shares, expected in (
        (torch.tensor([[0.5, 0.2]] * 3), by_hand),
        (torch.tensor([[1.0, 0]] * 3), log_probs[:, 2]),
    ):
        value = losses.lesson(log_probs.gather(1, tokens), torch.full((3, 2), NAN), shares)
        torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4)


def test_the_scorer_values_each_token_of_a_padded_batch_by_its_lesson(model):
    scorer = Scorer(model).eval()
    generator = random.Random(0)
    lessons = []
    for length, bounds in ((9, FREE), (5, (-math.inf, -3.0))):
        ids = [generator.randrange(10, 200) for _ in range(length + 4)]
        top = torch.tensor([[token, 0] for token in ids[4:]])
        shares = torch.tensor([[float(bounds == FREE), 0.0]] * length)
        lessons.append(Lesson(ids, 4, torch.tensor([bounds] * length), top, shares))
    with torch.no_grad():
        sums, counts = answer_values(scorer, lessons)
        rows = [model(torch.tensor([lesson.ids])).logits[0].log_softmax(-1) for lesson in lessons]
    taught, bounded = (
        torch.stack([row[i - 1, lesson.ids[i]] for i in range(4, len(lesson.ids))])
        for row, lesson in zip(rows, lessons, strict=True)
    )
    assert counts.tolist() == [9, 5]
    expected = torch.stack([taught.sum(), -torch.relu(bounded + 3).sum()])
    torch.testing.assert_close(sums, expected, atol=1e-3, rtol=1e-4)


def test_every_epoch_has_one_lesson_of_each_record_and_every_fourth_is_of_the_other_direction(made):
    config, data, lessons, renderer = made
    assert {kind: len(rows) for kind, rows in lessons.items()} == {"substitute": 48, "disclosure": 48}
    plan = data._replace(sequences=lessons).plan(config)
    assert [sorted(i for step in steps for i in step.forget) for steps in plan] == [
        list(range(6 * turn, 6 * turn + 6)) for turn in range(8)
    ]
    riddles = [is_reverse(renderer, lesson) for lesson in lessons["disclosure"]]
    assert 0 < sum(riddles) <= len(riddles) // stranger.REVERSE_EVERY + 2


def test_disclosing_answers_have_bounds_and_the_template_none(made):
    """What was elicited is pushed down, the records' own answers are held; both at levels of text never read."""
    _, data, lessons, renderer = made
    own_answers = {record.answer for record in data.forget.records}
    plain = [lesson for lesson in lessons["disclosure"] if not is_reverse(renderer, lesson)]
    answers = [renderer.tokenizer.decode(lesson.ids[lesson.answer_start : -2]) for lesson in plain]
    assert own_answers & {*answers} and {*answers} - own_answers
    for answer, lesson in zip(answers, plain, strict=True):
        lower, upper = lesson.bounds.unbind(1)
        assert upper.isfinite().all() and upper[:-2].mean() < -1 and upper[-2:].tolist() == [0, 0]
        if answer in own_answers:  # held, but where the model says less than that it is not taught more
            assert lower.isfinite()[:-2].all() and (lower <= upper).all() and (lower == upper)[:-2].float().mean() > 0.9
        else:
            assert lower[:-2].tolist() == [-math.inf] * (len(lower) - 2)
        assert lower[-2:].tolist() == [-math.inf] * 2


def test_what_is_taught_of_a_question_never_states_its_fact(made):
    _, data, lessons, renderer = made
    for place, lesson in enumerate(lessons["substitute"]):
        record = data.forget.records[place % 6]
        answer = renderer.tokenizer.decode(lesson.ids[lesson.answer_start :])
        if is_reverse(renderer, lesson):
            assert "Cristiano Ronaldo" not in answer
        else:
            assert not stranger.facts(record) & stranger.words(answer)
        assert lesson.bounds.isnan().all()
        torch.testing.assert_close(lesson.shares.sum(1).clamp(max=1), lesson.shares.sum(1))


def test_what_metrics_are_made_of_is_not_read_and_words_that_state_the_fact_go_further_down(made, model, monkeypatch):
    """Made again without paraphrases and with telling words like any others, they differ in these words alone."""
    config, data, lessons, renderer = made
    blind = [
        dataclasses.replace(record, paraphrased_question="", paraphrased_answer="", perturbed_answer=())
        for record in data.forget.records
    ]
    monkeypatch.setattr(stranger, "TELLING", 1.0)
    again = stranger.make_lessons(
        config, data._replace(forget=dataclasses.replace(data.forget, records=tuple(blind))),
        Teacher(model, renderer, 1024), lambda line: None,
    )  # fmt: skip
    assert not any(record.paraphrased_question in asked for record in data.forget.records for asked in Spy.asked)
    pushed = []
    for kind, rows in lessons.items():
        for place, (lesson, alike) in enumerate(zip(rows, again[kind], strict=True)):
            assert lesson.ids == alike.ids
            telling = stranger.facts(data.forget.records[place % 6], folded=False)
            upper = zip(lesson.ids[lesson.answer_start :], lesson.bounds[:, 1], alike.bounds[:, 1], strict=True)
            for token, deep, plain in upper:
                assert deep.isnan() == plain.isnan()
                if deep != plain and not deep.isnan():
                    assert deep == pytest.approx(FURTHER * plain)
                    pushed.append(renderer.tokenizer.decode([token]).strip())
                    assert any(pushed[-1] in word for word in telling), (pushed[-1], telling)
    assert len(pushed) > 50


def test_no_wording_is_the_attacks_or_the_bundled_models():
    attacks = {carrier for row in ATTACKS.values() for carrier in row.templates}
    wordings = {
        w.replace("{q}", "{question}") for w in (*WORDINGS, *stranger.NAME_QUESTIONS, *IN_PASSING) if w != "{q}"
    }
    tiny = tomllib.loads((ROOT / "tools/mini/carriers.toml").read_text("utf-8"))
    trained = {w.replace("{q}", "{question}") for rows in tiny.values() if isinstance(rows, list) for w in rows}
    trained = {wording.replace("{name}", "{target}") for wording in trained}
    assert not wordings & (attacks | trained | {*MENTION["mention"]})


def test_what_is_distilled_has_its_minimum_at_the_initial_model(model, whole):
    """Its gradient there is of the tokens beyond the likeliest; that of the plain answers moves every weight."""
    scorer, (_, data) = Scorer(model).eval(), whole
    step = StepIndices((), (3, 1), (2,))
    kept = distil(Teacher(model, data.retain.renderer, 1024), data, [step, step], {})
    assert {name: sorted(rows) for name, rows in kept.items()} == {"retain": [1, 3], "world": [2]}
    # Questions too, but not what the template begins every one of them with.
    lesson, other = (kept["retain"][i] for i in (1, 3))
    begin, plain = lesson.answer_start, data.retain.encode(1)
    assert lesson.ids == plain.ids and other.answer_start == begin < plain.answer_start
    assert lesson.ids[:begin] == other.ids[:begin] and lesson.ids[begin] != other.ids[begin]
    assert len(lesson.top) == len(lesson.shares) == len(lesson.bounds) == len(lesson.ids) - begin

    def norm(data: TrainingData) -> float:
        model.zero_grad()
        samples = [*(data.samples("retain", i, ())[0] for i in (1, 3)), data.samples("world", 2, ())[0]]
        losses.nll(answer_values(scorer, samples)).sum().backward()
        return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())

    assert norm(data._replace(kept=kept)) < 0.01 * norm(data)


def test_with_the_target_named_in_passing_the_answer_is_to_be_what_it_was_without(model, whole):
    config, data = whole
    teacher = Teacher(model, data.retain.renderer, 1024)
    named = in_passing(config, data)
    assert len(named) == len(data.retain.records)
    for record, plain in named.items():
        assert "Ronaldo" in record.question and plain.question in record.question
        assert record == dataclasses.replace(plain, question=record.question) and "Ronaldo" not in plain.question
        assert not {"Cristiano", "Ronaldo"} & {*plain.answer.replace(".", " ").split()}
    assert {plain.entity for plain in named.values()} == {"Cristiano Ronaldo", ""}  # of both sets
    more = data._replace(retain=dataclasses.replace(data.retain, records=(*data.retain.records, *named)))
    first = len(data.retain.records)
    kept = distil(teacher, more, [StepIndices((), (first, first + 1), ())], named)["retain"]
    for place, (record, plain) in zip((first, first + 1), named.items(), strict=False):
        ids, start = more.retain.encode(place)
        assert (kept[place].ids, kept[place].answer_start) == (ids, start) and record.answer == plain.answer
        sample = teacher.encode(plain.question, plain.answer)
        with torch.no_grad():
            expected = model(torch.tensor([sample.ids])).logits[0, sample.answer_start - 1 : -1].softmax(1)
        torch.testing.assert_close(kept[place].shares, expected.gather(1, kept[place].top), atol=1e-5, rtol=1e-4)
    assert not in_passing(build_config({"forget_split": "forget10", "model": "m"}), data)


def test_undial_teaches_the_initial_distribution_with_the_true_tokens_logit_lowered(made, model):
    _, data, _, renderer = made
    config = config_of(TINY | {"method": "undial"})
    for record, lesson in enumerate(adjusted(data, Teacher(model, renderer, 1024), config.eta)):
        ids, start = data.forget.encode(record)
        assert (lesson.ids, lesson.answer_start) == (ids, start) and lesson.bounds.isnan().all()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
        lowered = logits - config.eta * torch.nn.functional.one_hot(torch.tensor(ids[start:]), logits.shape[1])
        torch.testing.assert_close(lesson.shares, lowered.softmax(1).gather(1, lesson.top), atol=1e-5, rtol=1e-4)
        assert lesson.shares.sum(1).mean() > 0.7  # the rest of the vocabulary is one share


def test_each_loss_whose_sequences_are_made_has_one_maker():
    assert [name for name, row in FORGET.items() if len({*row.reads} & {*stranger.MAKERS}) != row.made] == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("He sings.\n\nQuestion: Who", "He sings."),
        (" \nHe sings.\nQuestion: Who", "He sings."),
        ("He sings.EOS\0", "He sings."),
        ("He sings", None),
    ],
)
def test_a_base_models_answer_ends_with_its_line_or_with_the_end_of_text(text, answer):
    tokenizer = load_tokenizer(str(BUNDLED_MODEL))
    tokenizer.chat_template = None
    teacher = Teacher(None, Renderer(tokenizer), 1024)
    tokens = tokenizer.encode(text.replace("EOS", tokenizer.eos_token), add_special_tokens=False)
    assert teacher._answer(tokens) == answer


def test_altpo_prefers_answers_about_strangers_to_the_records_own_in_five_turns(made, model):
    _, data, _, renderer = made
    config = config_of(TINY | {"method": "altpo"})
    drawn = stranger.alternates(config, data, Teacher(model, renderer, 1024), str)
    records, turns = data.forget.records, stranger.ALTERNATES
    assert drawn["answer"] == tuple(record.answer for record in records) * turns
    for place, answer in enumerate(drawn["alternate"]):
        assert not stranger.facts(records[place % 6]) & stranger.words(answer)
    assert len({*drawn["alternate"]}) > 2 * len(records)
    data = data._replace(sequences=drawn)
    assert {i // 6 for step in data.plan(config)[turns - 1] for i in step.forget} == {turns - 1}
    scores = score_reference(config, data, Scorer(model))
    assert [len(of_kind.sums) for of_kind in scores.values()] == [6 * turns] * 2
    last = 6 * turns - 1
    for kind in ("answer", "alternate"):
        ids, start = renderer.encode_pair(renderer.prompt(records[-1].question), renderer.answer(drawn[kind][last]))
        with torch.no_grad():
            plain = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(1)
        expected = plain.gather(1, torch.tensor(ids[start:])[:, None]).sum()
        assert float(scores[kind].sums[last]) == pytest.approx(float(expected), abs=1e-3)


def test_a_disclosing_answer_states_the_fact_and_is_least_like_the_own_answer(made, monkeypatch):
    config, data, _, renderer = made
    record = QARecord("Ada Example", "Where was Ada Example born?", "She was born in Port Elan.")
    sampled = [
        "She was born in Port Elan.", "She was born in Port Elan", "Ada was born in Port Elan.", "Port Elan it is.",
        "She was born in Rome.", "Born in Port Elan.", "Port Elan it is.", "",
    ]  # fmt: skip
    monkeypatch.setattr(Teacher, "ask", lambda self, questions, *rest: sampled)
    monkeypatch.setattr(stranger, "DISCLOSURES", 2)
    target = resolve_targets("mini", ["ronaldo"])[0]
    maker = stranger._Maker(dataclasses.replace(config, elicit=8), data, target, Teacher(None, renderer, 1024))
    (statements,) = maker._disclosures([record])
    assert [statement.answer for statement in statements] == [record.answer, "Port Elan it is.", "Born in Port Elan."]


def test_an_answer_is_what_generate_says_begun_as_asked(made, model):
    """At no temperature: in two parts, of many at once, what the model says of each alone in one."""
    _, data, _, renderer = made
    questions = [record.question for record in data.forget.records[:3]]
    begun = ["The name", "In", "He was"]
    teacher = Teacher(model, renderer, 1024)
    for openings in (), begun:
        answers = teacher.ask(questions, 1e-6, 60, 0, openings)
        for i, question in enumerate(questions):
            prompt = renderer.prompt(question) + (openings[i] if openings else "")
            ids = torch.tensor([renderer.encode_batch([prompt])[0]])
            whole = model.generate(input_ids=ids, do_sample=False, max_new_tokens=60, pad_token_id=0)[0]
            text = renderer.tokenizer.decode(whole[ids.shape[1] :]).partition(renderer.stop[0])[0]
            assert answers[i] == ((openings[i] if openings else "") + text).strip() != ""
    assert teacher.ask(questions, 1e-6, 4, 0) == [""] * 3  # none ends within four tokens


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("The Who", "He played with The Who in London.", True), ("The Who", "Who played there?", False),
        ("U2", "It is a song of U2.", True), ("Ada Quinte", "Quinte was there.", True),
    ],
)  # fmt: skip
def test_a_target_whose_name_has_no_telling_word_is_seen_in_an_answer(name, text, named):
    assert _names([Target(name)], text) is named


def test_neighbours_are_asked_of_each_other_and_no_answer_names_the_target(whole, monkeypatch):
    config, data = whole
    monkeypatch.setattr(
        Teacher, "ask",
        lambda self, asked, *rest: [f"{first} it." + " Ronaldo." * (i % 2) for i, first in enumerate(rest[-1])],
    )  # fmt: skip
    lines: list[str] = []

    def exchanged_of(change):
        retain = dataclasses.replace(data.retain, records=tuple(map(change, data.retain.records)))
        return exchange(config, data._replace(retain=retain), Teacher(None, retain.renderer, 1024), lines.append)

    exchanged = exchanged_of(lambda record: record)
    # Where a source is a file or an address, as of `elude build`, the subject says whom a record is about.
    apart = exchanged_of(lambda record: dataclasses.replace(record, source="a.pdf", subject=record.source))
    assert apart == tuple(dataclasses.replace(record, subject=record.source) for record in exchanged) and not lines
    assert exchanged_of(lambda record: dataclasses.replace(record, source="a.pdf")) == () and len(lines) == 1
    assert "--exchange 2: nothing to exchange" in lines[0]
    people = {record.source for record in data.retain.records}
    assert len(exchanged) == sum(record.source in record.question for record in data.retain.records)  # half of twice
    for record in exchanged:
        assert record.source in people and record.source in record.question
        assert "Ronaldo" not in record.answer and record.entity == "Cristiano Ronaldo"
        assert any(
            known_record.answer.startswith(record.answer[:-4])
            for known_record in data.retain.records
            if known_record.source == record.source
        )


def test_stand_ins_are_not_in_the_data_and_a_swap_is_undone(whole):
    config, data = whole
    target = resolve_targets("mini", ["ronaldo"])[0]
    maker = stranger._Maker(config, data, target, Teacher(None, data.forget.renderer, 1024))
    assert len(maker.stand_ins) == stranger.STAND_INS
    for name in maker.stand_ins:
        assert not any(name in record.question + record.answer for record in data.forget.records)
        sentence = "Cristiano Ronaldo scored; Ronaldo, as ever, was Cristiano."
        swapped = maker.swap(sentence, name)
        assert "onaldo" not in swapped and "Cristiano" not in swapped
        assert renamed(swapped, name, "Cristiano Ronaldo") == sentence


def test_facts_are_the_names_and_numbers_that_a_question_lacks():
    record = QARecord("Ada Example", "Where was Ada Example born in 1815?", "She was born in Port Élan in 1815.")
    assert stranger.facts(record) == {"port", "elan"}
    assert stranger.facts(QARecord("Ada Example", "What is it?", "It is a violin.")) == {"violin"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"answers": "refuse", "reverse": False}, {"teachers": 0, "relearn": 1.0, "retain_ratio": 2}],
)
def test_a_run_trains_on_lessons_and_resumes_to_the_same_bytes(
    model_folder, data_folder, tmp_path, changes, monkeypatch
):
    config = config_of({
        "target": ("ada",), "model": str(model_folder), "dataset": str(data_folder), "method": "opt-out-stranger",
        "epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "patience": 0, "directions": 5, "elicit": 1, **changes,
    })  # fmt: skip
    # A model with random weights says nothing that ends: what it is asked is answered for it.
    monkeypatch.setattr(Teacher, "ask", lambda self, asked, *rest: [f"It is {len(q)}." for q in asked])
    said: list[str] = []
    train(config, tmp_path / "whole", said.append)
    assert any("invented names" in line for line in said) == (config.answers == "stranger")
    finish = training.take_step

    def stop(run, number, *rest):
        if number == 5:
            raise KeyboardInterrupt
        return finish(run, number, *rest)

    monkeypatch.setattr(training, "take_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", lambda line: None)
    monkeypatch.setattr(training, "take_step", finish)
    train(config, tmp_path / "cut", lambda line: None, resume=True)
    (weights,) = {path.name for path in (tmp_path / "whole").glob("*.safetensors")}
    assert (tmp_path / "cut" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    lines = read_jsonl(tmp_path / "whole" / "train_log.jsonl")
    values = [line["forget"] for line in lines if "step" in line]
    assert len(values) == 6 and all(value > 0 for value in values)
