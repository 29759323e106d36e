"""Prompts and answers as transformers writes them, for templates in the shape of real ones and for none."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from lm_eval_elude.errors import UserError
from lm_eval_elude.tasks.tofu import EVALUATORS
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from tests.support import SHAPES, answer_tokens, conversation, make_tokenizer

RENDERERS = {shape: Renderer(make_tokenizer(shape)) for shape in SHAPES}
WITH_SYSTEM = [shape for shape in SHAPES if shape not in ("gemma", "dropping")]
WORDS = st.lists(
    st.sampled_from(["where", "was", "Cristiano", "Ronaldo", "born", "in", "1985", "?", ",", "Zürich", "東京"]),
    min_size=1,
    max_size=8,
).map(" ".join)


@pytest.fixture
def chatml():
    """A tokenizer that a test may change."""
    return copy.deepcopy(RENDERERS["chatml"].tokenizer)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=15, deadline=None)
@given(question=WORDS, answer=WORDS)
def test_prompt_and_answer_are_the_templates_own_text_and_tokens(shape, question, answer):
    """The whole is what the template writes for the conversation, and the answer is all that follows the prompt."""
    renderer = RENDERERS[shape]
    prompt, whole = conversation(renderer.tokenizer, question, answer)
    assert (renderer.prompt(question), renderer.prompt(question) + renderer.answer(answer)) == (prompt, whole)
    assert renderer.encode_pair(prompt, renderer.answer(answer)) == answer_tokens(renderer.tokenizer, question, answer)


@pytest.mark.parametrize("shape", WITH_SYSTEM)
def test_a_system_text_stands_once_before_the_question(shape):
    prompt = RENDERERS[shape].prompt("Who is it?", system="Say little.")
    assert prompt == conversation(RENDERERS[shape].tokenizer, "Who is it?", "", system="Say little.")[0]
    assert prompt.count("Say little.") == 1 and prompt.index("Say little.") < prompt.index("Who is it?")


@pytest.mark.parametrize(
    ("shape", "problem"),
    [("gemma", "refuses the conversation: System role not supported"), ("dropping", "drops the system turn")],
)
def test_a_template_that_refuses_or_drops_the_system_turn_is_an_error(shape, problem):
    with pytest.raises(UserError, match=problem) as error:
        RENDERERS[shape].prompt("Who?", system="Say little.")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [s for s in SHAPES if SHAPES[s].bos and s != "phi-3.5"])
def test_the_bos_token_stands_once(shape):
    renderer = RENDERERS[shape]
    ids = renderer.encode(renderer.prompt("Who?"))
    # [INST] templates leave BOS to the tokenizer, Llama-3's writes it as text.
    assert ids[0] == renderer.tokenizer.bos_token_id and ids.count(renderer.tokenizer.bos_token_id) == 1
    texts = [renderer.prompt("Who?"), "no bos in this text", renderer.prompt("Why?")]
    assert renderer.encode_batch(texts) == [renderer.encode(text) for text in texts]
    assert renderer.encode_batch([]) == []


@pytest.mark.parametrize(("opens", "closes"), [
    ("<think>\\n", "\\n</think>\\n\\n"), ("", "<|channel|>final<|message|>"),
])  # fmt: skip
def test_what_closes_a_block_before_the_answer_is_of_the_prompt(opens, closes, chatml):
    """As templates of models that think, and of channels, write it: no token of it is an answer's."""
    chatml.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{{ '"
        f"{opens}{closes}' }}}}{{% endif %}}{{{{ m.content + '<|im_end|>' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n{opens}' }}}}{{% endif %}}"
    )
    renderer = Renderer(chatml)
    shown = (opens + closes).replace("\\n", "\n")
    assert renderer.prompt("Who?") == f"<|im_start|>user\nWho?<|im_end|><|im_start|>assistant\n{shown}"
    assert renderer.answer("A singer.") == "A singer.<|im_end|>" and renderer.beginning("A") == "A"


def test_a_tokenizer_that_ends_every_text_is_one_line(chatml):
    for tokenizer in (make_tokenizer("base"), copy.deepcopy(chatml)):
        ends = [(tokenizer.eos_token, tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            f"$A {tokenizer.eos_token}", special_tokens=ends
        )
        with pytest.raises(UserError, match=r"^the tokenizer puts EOS after every text, .*add_eos_token"):
            Renderer(tokenizer)


@pytest.mark.parametrize(("evaluator", "shown"), [
    ("released", "Question: Who is he?\n"), ("released-llama2", "[INST] Who is he? [/INST]"),
])  # fmt: skip
def test_tofus_questions_are_put_as_its_evaluators_put_them(evaluator, shown):
    """The question_start_tag and question_end_tag of locuslab/tofu's model configuration."""
    assert Renderer(make_tokenizer("base"), EVALUATORS[evaluator].wording).prompt("Who is he?") == shown
    assert EVALUATORS[evaluator].records == 300
    assert EVALUATORS["open-unlearning"].system == "You are a helpful assistant."


@pytest.mark.parametrize(
    ("shape", "answer", "stop"),
    [
        ("llama-3.1", "A.<|eot_id|>", ["<|eot_id|>"]),
        ("phi-3.5", "A.<|end|>\n<|endoftext|>", ["<|end|>"]),
        ("chatml", "A.<|im_end|>\n", ["<|im_end|>"]),
        ("qwen3", "A.<|im_end|>\n", ["<|im_end|>"]),
        ("gemma", "A.<end_of_turn>\n", ["<end_of_turn>"]),
        ("dropping", " A.</s>", ["</s>"]),
        ("base", " A.\n\n", ["Question:", "\n\n"]),
    ],
)
def test_the_answer_holds_all_that_the_template_writes_and_generation_stops_at_the_end_of_turn(shape, answer, stop):
    assert RENDERERS[shape].answer(" A. ") == answer and RENDERERS[shape].stop == stop


def test_no_prompt_depends_on_the_day(monkeypatch):
    import datetime

    renderer = RENDERERS["llama-3.1"]
    dated = Renderer(make_tokenizer("llama-3.1"))
    dated.tokenizer.chat_template = dated.tokenizer.chat_template.replace('"26 Jul 2024"', 'strftime_now("%d %b %Y")')
    assert dated.prompt("Who?") == renderer.prompt("Who?")
    assert datetime.date.today().strftime("%d %b %Y") not in dated.prompt("Who?")
    header = "{%- set today = strftime_now('%d %B %Y') -%}{{ 'Today is ' + today + '.' }}"  # as Mistral Small 3 asks
    dated.tokenizer.chat_template = header + renderer.tokenizer.chat_template
    assert Renderer(dated.tokenizer).prompt("Who?") == f"Today is 26 Jul 2024.{renderer.prompt('Who?')}"


ANOTHER_HEADER = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'bot>' }}{% endif %}"
)
FAILING = ("messages[0]['content'] + 1", "messages[7].x.y", "none()")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (ANOTHER_HEADER, "does not continue its own generation prompt"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not continue its own generation prompt"),
        *(("{{ " + body + " }}", "the model's chat template ") for body in FAILING),
    ],
)
def test_a_template_that_hides_the_boundary_or_fails_is_one_line(chatml, template, problem):
    chatml.chat_template = template
    with pytest.raises(UserError, match=problem) as error:
        Renderer(chatml)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("joined", "end"),
    [
        (None, "\n"),
        ("?\n", " dive?\n"),
        (" whales dive?\n", " whales dive?\n"),  # fewer tokens with the line end than without
    ],
)
def test_the_words_that_a_token_joins_with_a_prompts_white_space_are_part_of_its_end(joined, end):
    tokenizer = make_tokenizer("llama-3.1")
    tokenizer.add_tokens([AddedToken(joined.replace("dive", "do")), AddedToken(joined)] if joined else [])
    renderer = Renderer(tokenizer, EVALUATORS["released"].wording)  # a prompt ends in "?" and a line end
    assert renderer.split(renderer.prompt("How  deep do whales dive?"))[1] == end


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("question", ["Who is it?", 'Who sang "Blue"?', "Name a club.", "Where (and when)?", "\u8ab0?"])
def test_a_context_is_read_as_the_whole_prompt_reads_it(shape, question):
    renderer = RENDERERS[shape]
    prompt = renderer.prompt(question)
    context, end = renderer.split(prompt)
    ids, whole = renderer.encode(context), renderer.encode(prompt)
    assert context + end == prompt and context == context.rstrip() and whole[: len(ids)] == ids
    assert renderer.end_is_asked == (len(whole) > len(ids))
    assert bool(end.strip()) == (shape == "tulu")  # its "|>" is one token with the line end after it


def test_the_fingerprint_knows_vocabulary_and_template(chatml):
    assert Renderer(chatml).fingerprint == RENDERERS["chatml"].fingerprint
    chatml("a b c d", truncation=True, max_length=2)
    chatml(["a b c d", "a"], padding=True)
    assert Renderer(chatml).fingerprint == RENDERERS["chatml"].fingerprint  # how it was used is no rule of its
    chatml.chat_template = chatml.chat_template.replace("Qwen", "Someone")
    prints = [RENDERERS[s].fingerprint for s in SHAPES]
    prints += [Renderer(chatml).fingerprint, Renderer(make_tokenizer("chatml", vocabulary=800)).fingerprint]
    assert len(set(prints)) == len(prints)


def test_the_tokenizer_is_left_as_it_was(chatml):
    before = copy.deepcopy(chatml)
    Renderer(chatml).encode_pair("a", "b")
    assert chatml.backend_tokenizer.to_str() == before.backend_tokenizer.to_str()
    assert (chatml.padding_side, chatml.chat_template) == (before.padding_side, before.chat_template)


def test_loading_a_tokenizer_leaves_transformers_as_loud_as_it_was(tmp_path, chatml):
    from transformers.utils import logging

    chatml.save_pretrained(tmp_path)
    assert Renderer(load_tokenizer(str(tmp_path))).prompt("Who?") == RENDERERS["chatml"].prompt("Who?")
    before = logging.get_verbosity()
    try:
        for level in (10, 40):
            logging.set_verbosity(level)
            load_tokenizer(str(tmp_path))
            assert logging.get_verbosity() == level
            with pytest.raises(UserError):
                load_tokenizer(str(tmp_path / "none"))
            assert logging.get_verbosity() == level
    finally:
        logging.set_verbosity(before)


def test_a_tokenizer_that_cannot_be_found_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, problem in [
        (str(tmp_path / "empty"), "no tokenizer for .*tokenizer="),
        (str(tmp_path / "absent"), "does not exist"),
        ("nobody/nothing", "no tokenizer for 'nobody/nothing'"),
    ]:
        with pytest.raises(UserError, match=problem) as error:
            load_tokenizer(name)
        assert "\n" not in str(error.value)
