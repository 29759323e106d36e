"""Messages to prompt text and answer text: the one place where a conversation is written, in training and in scoring.

The *answer text* is everything the chat template writes after the generation prompt: the answer, the end-of-turn
token and whatever follows it. A model without a chat template gets the plain format
``Question: {question}\\nAnswer:`` with the answer text `` {answer}\\n\\n``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lm_eval_elude.errors import UserError, reason

# Templates that print today's date would ask a different question every day (Llama-3.2), and thinking templates
# put an empty thinking block on one side of the answer boundary only (Qwen3) unless told not to think.
TEMPLATE_ARGUMENTS = {"date_string": "26 Jul 2024", "enable_thinking": False}
# In front of a template that asks for today's date itself (Mistral Small 3, SmolLM3, Granite 3).
_FIXED_DATE = f"{{%- macro strftime_now(format) -%}}{TEMPLATE_ARGUMENTS['date_string']}{{%- endmacro -%}}"
_QUESTION, _PROBE, _NEXT = "What do blue whales do?", "Blue whales sing.", "And what do owls do?"
# A block of thoughts that a generation prompt opens and leaves open (DeepSeek-R1, QwQ).
_OPENED = re.compile(r"<(?P<angle>\w+)>\s*$|\[(?P<square>[A-Z]+)\]\s*$")


class Wording(NamedTuple):
    """A prompt format without a chat template."""

    prompt: str  # with ``{question}`` in it
    lead: str  # what stands between the prompt and the answer, and counts as answer
    tail: str = ""  # what ends the answer; "" for the tokenizer's end-of-sequence token
    stop: tuple[str, ...] = ()  # texts that end a generated answer, besides that token


# Base models go on with questions of their own, after a line end, a blank line or a space. One that was trained in this
# format ends its answers with a blank line and goes on with anything: that ends them too.
PLAIN = Wording("Question: {question}\nAnswer:", " ", "\n\n", ("Question:", "\n\n"))
RAW = Wording("{question}", "")


class Encoded(NamedTuple):
    """Token ids of prompt and answer text together, and where the answer starts (an index into ``ids``)."""

    ids: list[int]
    answer_start: int


def cut_prompt(prompt: str, words: int = 0) -> tuple[str, str]:
    """A prompt as context and end: the end is its last words, none by default, and the white space after them."""
    starts = [word.start() for word in re.finditer(r"\S+", prompt)]
    context = prompt[: [*starts, len(prompt)][max(0, len(starts) - words)]].rstrip()
    return context, prompt[len(context) :]


class Renderer:
    """Writes prompts and answers for one tokenizer, which is read and never changed.

    A ``wording`` takes the chat template's place; without a template :data:`PLAIN` does. ``template`` is the name of
    one of several templates, or ``plain`` for :data:`PLAIN`. ``system`` is the system turn of prompts that are given
    none. ``remark`` is a line on a template that is used in another way than its past turns are written, "" for none.
    UserError where the template hides the answer, or the tokenizer ends a prompt as if no answer followed.
    """

    def __init__(
        self, tokenizer: Any, wording: Wording | None = None, system: str = "", *, template: str = ""
    ) -> None:  # fmt: skip
        self.tokenizer, self.system, self.remark = tokenizer, system, ""
        self._parts = False  # whether a turn's content is a list of parts
        self._template = None if wording or template == "plain" else chat_template(tokenizer, template)
        self.wording = wording or (None if self._template else PLAIN)
        self._before = ""  # what a prompt ends with after the template's generation prompt
        if self.wording:
            self._lead, self._tail = self.wording.lead, self.wording.tail or str(tokenizer.eos_token or "")
        else:
            self._lead, self._tail = self._probe()
            if self._lead.strip():  # it closes a block that comes before the answer (of thinking, a channel)
                self._before, self._lead = self._lead, ""
        prompt, eos = self.prompt(_QUESTION), tokenizer.eos_token_id
        if eos is not None and self.encode(prompt)[-1:] == [eos] and not prompt.endswith(tokenizer.eos_token):
            raise UserError(
                "the tokenizer puts EOS after every text, also after a prompt whose answer is to follow; switch that "
                "off in its tokenizer_config.json (add_eos_token) or tokenizer.json (post_processor)"
            )

    def prompt(self, question: str, system: str | None = None) -> str:
        """The text a model is asked with, generation prompt included.

        UserError where ``system`` is given and the template refuses it or drops it.
        """
        system = system or self.system
        if self.wording:
            plain = self.wording.prompt.format(question=question)
            return f"{system}\n\n{plain}" if system else plain
        text = self.conversation([("system", system)] if system else [], question)
        if system and system.strip() not in text:
            raise UserError(
                "the model's chat template drops the system turn, so the system instruction or guardrail "
                "would have no effect; use a model whose template has one"
            )
        return text

    def conversation(self, turns: Sequence[tuple[str, str]], question: str) -> str:
        """The prompt of a question after (role, text) turns."""
        if self.wording:
            past = [self.answer(text) if role == "assistant" else self.prompt(text) for role, text in turns]
            return "".join([*past, self.prompt(question)])
        messages = [{"role": role, "content": text} for role, text in (*turns, ("user", question))]
        return self._apply(messages, add_generation_prompt=True) + self._before

    def answer(self, text: str) -> str:
        """What the template writes after the generation prompt for this answer."""
        return f"{self._lead}{text.strip()}{self._tail}"

    def beginning(self, words: str) -> str:
        """The answer text up to the end of an answer's first words; "" for none."""
        return f"{self._lead}{words.strip()}" if words.strip() else ""

    @property
    def stop(self) -> list[str]:
        """Texts that end a generated answer: the end of turn; of the plain format the next question or a blank line."""
        if self.wording and self.wording.stop:
            return list(self.wording.stop)
        if not (tail := self._tail.strip()):
            return list(PLAIN.stop[:1])
        # The first token that the template writes after an answer (Phi-3.5's writes a second one).
        special = [token for token in self.tokenizer.get_added_vocab() if tail.startswith(token)]
        return [max(special, key=len, default=tail.splitlines()[0])]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that may already start with the BOS text (it is then not added twice)."""
        return self.tokenizer.encode(text, add_special_tokens=not self._starts_with_bos(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` for many texts at once."""
        flags = [self._starts_with_bos(text) for text in texts]
        if len(set(flags)) == 1:
            return self.tokenizer(list(texts), add_special_tokens=not flags[0], padding=False)["input_ids"]
        return [self.encode(text) for text in texts]

    def encode_pair(self, prompt: str, answer_text: str) -> Encoded:
        """Tokenize prompt and answer text as one; the answer starts after the tokens of the prompt alone."""
        return Encoded(self.encode(prompt + answer_text), len(self.encode(prompt)))

    def encode_turn(self, question: str, answer: str, system: str | None = None) -> Encoded:
        """A question and its whole answer as token ids."""
        return self.encode_pair(self.prompt(question, system), self.answer(answer))

    def split(self, prompt: str) -> tuple[str, str]:
        """A prompt as the context of log-likelihood requests and its end, which goes before their continuations.

        The harness moves white space from the end of a context into the continuation, and cuts the tokens there. So
        the end is that white space, and the words before it that a token joins with it (``?`` and a line end are one
        for Llama-3 and Qwen). Unnecessary once the harness leaves contexts as they are.
        """
        whole, words = self.encode(prompt), 0
        while (context := cut_prompt(prompt, words)[0]) and whole[: len(ids := self.encode(context))] != ids:
            words += 1
        return cut_prompt(prompt, words)

    @cached_property
    def end_is_asked(self) -> bool:
        """Whether the end of a prompt has tokens, which are no answer's: it is asked for by itself and subtracted."""
        prompt = self.prompt(_QUESTION)
        return len(self.encode(prompt)) > len(self.encode(self.split(prompt)[0]))

    @property
    def fingerprint(self) -> str:
        """What the prompts and token ids depend on: vocabulary and template (SHA-256, first 16 digits)."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None and (backend.truncation or backend.padding):  # how it was last used is no rule of its
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        rules = backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        template = self._template if self.wording in (None, PLAIN) else self.wording
        return hashlib.sha256(f"{rules}\0{template}".encode()).hexdigest()[:16]

    def _starts_with_bos(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return bool(bos) and text.startswith(bos)

    def _apply(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        if self._parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        template = str(self._template)
        arguments["chat_template"] = (_FIXED_DATE if "strftime_now" in template else "") + template
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **TEMPLATE_ARGUMENTS, **arguments)
        except Exception as error:  # a template is a program of the model's maker
            raise UserError(f"the model's chat template refuses the conversation: {reason(error)}") from None

    def _probe(self) -> tuple[str, str]:
        """What the template writes before and after an answer, learnt from one conversation."""
        turns = [{"role": "user", "content": _QUESTION}]
        whole = self._written([*turns, {"role": "assistant", "content": _PROBE}])
        if whole.count(_PROBE) != 1:
            raise UserError("the model's chat template does not write an answer as it is given")
        prompt, tail = self._apply(turns, add_generation_prompt=True), whole.partition(_PROBE)[2]
        if not tail.strip():
            tail = self._end(whole, turns)
        if whole.startswith(prompt):
            return whole[len(prompt) :].partition(_PROBE)[0], tail
        if not prompt.startswith(self._apply(turns)):
            raise UserError("the model's chat template does not continue its own generation prompt with the answer")
        closing = ""
        if opened := _OPENED.search(prompt):
            tag = f"</{opened['angle']}>" if opened["angle"] else f"[/{opened['square']}]"
            closing = ("" if prompt.endswith("\n") else "\n") + f"\n{tag}\n\n"
        self.remark = "the chat template's generation prompt differs from its past turns: it is used as it is served"
        self.remark += f", with {closing.strip()} after it" * bool(closing)
        return closing, tail

    def _written(self, messages: list[dict[str, Any]]) -> str:
        """A conversation in the form of content that the template takes: a string, else a list of parts."""
        text, refused = "", None
        try:
            text = self._apply(messages)
        except UserError as error:
            refused = error
        if _PROBE in text:
            return text
        self._parts = True
        try:
            return self._apply(messages)
        except UserError:
            raise refused or UserError("the model's chat template does not write an answer as it is given") from None

    def _end(self, whole: str, turns: list[dict[str, Any]]) -> str:
        """What ends an answer where the template writes nothing after the last: the next turn's first token, or EOS."""
        more = [{"role": "assistant", "content": _PROBE}, {"role": "user", "content": _NEXT}]
        between = self._apply([*turns, *more]).partition(_PROBE)[2].partition(_NEXT)[0]
        added = [token for token in self.tokenizer.get_added_vocab() if between.strip().startswith(token)]
        first: str = max(added, key=len, default="")
        return between[: between.index(first) + len(first)] if first else str(self.tokenizer.eos_token or "")


class Texts(Renderer):
    """Texts that no question comes before: they follow BOS, or EOS for a tokenizer without it, as in the harness."""

    def __init__(self, tokenizer: Any) -> None:
        before = "" if tokenizer.encode("") else tokenizer.bos_token or tokenizer.eos_token
        super().__init__(tokenizer, Wording(before, ""))

    def answer(self, text: str) -> str:
        return text


def chat_template(tokenizer: Any, name: str = "") -> str | None:
    """The tokenizer's template, or the one of several that has this name; None where it has none.

    UserError for a name that is not there, and for a tokenizer that writes conversations in a format of its own.
    """
    from transformers import PreTrainedTokenizerBase

    template = getattr(tokenizer, "chat_template", None)
    if not template:
        own = PreTrainedTokenizerBase.apply_chat_template
        if getattr(type(tokenizer), "apply_chat_template", own) is not own:
            raise UserError(
                f"{type(tokenizer).__name__} has a chat format of its own and no template: give a tokenizer with a "
                'chat_template as tokenizer=..., or --metadata \'{"template": "plain"}\''
            )
        return None
    if isinstance(template, dict):
        if (name or "default") not in template:
            raise UserError(f"no chat template {name or 'default'!r}: the model has {', '.join(template)}, and plain")
        return str(template[name or "default"])
    if name:
        raise UserError(f"no chat template {name!r}: the model has one without a name, and plain")
    return str(template)


def check_place(name: str) -> None:
    """UserError where a model's name can only be a folder's, and there is none."""
    is_path = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if is_path and not os.path.exists(name):
        raise UserError(f"model folder {name!r} does not exist")


def load_tokenizer(
    name: str, *, revision: str | None = None, subfolder: str = "", trust_remote_code: bool = False
) -> Any:
    """Load a tokenizer by folder or Hub id; UserError where it cannot be found, which says where it was looked for."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    check_place(name)
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision, subfolder=subfolder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a folder's files can be wrong in any way
        here = "" if os.path.exists(name) else ", which is no folder here"
        raise UserError(
            f"no tokenizer for {name!r}{here} ({reason(error)}): give a folder or Hub id that has one (to lm_eval also "
            "as --model_args tokenizer=...)"
        ) from None
    finally:
        logging.set_verbosity(before)
