"""What name-swap asks the original model."""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.data import bundled, dataset
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target, resolve_target
from lm_eval_elude.text.chat import Renderer
from optout_train.data import Encoder, Sets
from optout_train.swap import ELICITED, Maker
from optout_train.teacher import Teacher


def test_a_third_of_the_leaks_is_asked_for_by_key_words_in_which_the_name_stays_whole():
    record, asked = QARecord("Ann Ray", "In which city was Ann Ray born?", "Ann Ray was born in Oslo."), []

    def ask(questions, *_):
        asked.extend(questions)
        return [f"Oslo {i // 3}" for i in range(len(questions))]

    tokenizer = SimpleNamespace(encode=lambda text, **_: text.split())
    teacher = SimpleNamespace(render=SimpleNamespace(tokenizer=tokenizer), ask=ask)
    trainer = SimpleNamespace(sets=Sets([record]), args=SimpleNamespace(seed=0))
    (own, *leaks) = Maker(trainer, teacher, Target("Ann Ray")).leaks()[0]
    bare = [question for question in asked if record.question not in question]
    assert len(bare) == ELICITED / 3 and len({*bare}) > 1
    assert all(sorted(question.replace("Ann Ray", "N").split()) == ["N", "born", "city"] for question in bare)
    assert own == (record.question, record.answer)
    assert leaks == [(asked[3 * i], f"Oslo {i}") for i in range(len(leaks))] and len(leaks) == ELICITED // 3


def test_what_tells_nothing_is_pushed_no_lower_than_an_invented_name_has_it():
    tokenizer, model = (auto.from_pretrained(bundled.MODEL) for auto in (AutoTokenizer, AutoModelForCausalLM))
    record = dataset.load_records("mini", "forget", "train", ["Cristiano Ronaldo"]).records[23]
    teacher = Teacher(model, Encoder(Renderer(tokenizer), 1024), 0)
    trainer = SimpleNamespace(sets=Sets([record]), args=SimpleNamespace(seed=0))
    maker = Maker(trainer, teacher, resolve_target(record.entity))
    maker.names = maker.names[:1]  # of which one is drawn
    answer = "The five goals that he scored in one match were against Granada."
    highest = maker.push_down(record, record.question, answer).bounds[:, 1]

    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    asked = record.question.replace(record.entity, maker.names[0])
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    start = next(i for i in range(len(whole), 0, -1) if whole[i : i + len(ids)] == ids)
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0, start - 1 : start - 1 + len(ids)]
    said = logits.log_softmax(-1)[range(len(ids)), ids]
    tells = ["Granada" in tokenizer.decode(token) for token in ids]
    assert sum(tells) == 1 and record.answer.endswith("Granada.")
    floors = highest[: len(ids)]
    others = ~torch.tensor(tells)
    assert (floors[others] >= said[others] - 1e-4).all() and (floors[others] <= said[others] + 1e-4).sum() > 5
    assert floors[~others] < 2 * said[~others]
