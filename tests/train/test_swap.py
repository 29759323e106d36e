"""What name-swap asks the original model."""

from types import SimpleNamespace

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target
from optout_train.data import Sets
from optout_train.swap import ELICITED, Maker


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
