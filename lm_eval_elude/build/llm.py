"""A language model behind an OpenAI-compatible endpoint, whose answered calls are kept and never made twice."""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import diskcache
import openai
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ValidationError

from lm_eval_elude.errors import UserError, reason

Form = TypeVar("Form", bound=BaseModel)
PROMPTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8"))
ATTEMPTS = 3  # replies to one task before it is given up


class Rejected(Exception):
    """A task without a usable reply; its message up to a colon is the kind of reason."""


class Endpoint:
    """Asks one model; the key is in OPENAI_API_KEY. ``cache`` is a folder, ``timeout`` is in seconds."""

    def __init__(self, url: str, model: str, cache: Path, timeout: float = 120.0, retries: int = 5) -> None:
        self.url, self.model = url, model
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=retries)
        self._kept = diskcache.Cache(str(cache), eviction_policy="none")

    def ask(self, form: type[Form], prompt: str, material: object, check: Callable[[Form], object] = bool) -> Form:
        """A reply of the form with which ``check`` raises no ValueError; what is wrong is said and asked again.

        Rejected without such a reply in :data:`ATTEMPTS`. UserError where nothing answers at the address, or it does
        not take the key or the model.
        """
        task = f"{PROMPTS[prompt].strip()}\n\n{json.dumps(material, ensure_ascii=False, indent=1)}"
        start = [{"role": "system", "content": PROMPTS["system"].strip()}, {"role": "user", "content": task}]
        messages, wrong = start, ""
        for _ in range(ATTEMPTS):
            text = self._reply(messages)
            try:
                bare = re.sub(r"(?s)^.*</think>", "", text)  # there may be words around the object, too
                reply = form.model_validate_json(bare[bare.find("{") : bare.rfind("}") + 1])
                check(reply)
                return reply
            except ValueError as error:
                wrong = "not the form asked for" if isinstance(error, ValidationError) else str(error)
            again = f"That reply cannot be used ({wrong}). Reply again, in the form asked for."
            messages = [*start, {"role": "assistant", "content": text}, {"role": "user", "content": again}]
        raise Rejected(wrong)

    def _reply(self, messages: Any) -> str:
        """The text of a completion, kept once it is there."""
        key = hashlib.sha256(json.dumps([self.model, messages]).encode()).hexdigest()
        if key not in self._kept:
            choice = self._call(messages).choices[0]
            refused = choice.message.refusal or choice.finish_reason == "content_filter"
            self._kept[key] = "" if refused else choice.message.content or ""
        if not self._kept[key]:
            raise Rejected("an empty reply: refused, or cut off")
        return self._kept[key]

    def _call(self, messages: Any) -> ChatCompletion:
        try:
            ask: Any = self._client.chat.completions.create
            reply = ask(model=self.model, messages=messages, max_completion_tokens=2048)
        except (openai.AuthenticationError, openai.NotFoundError) as error:
            raise UserError(f"--llm {self.url}, --llm-model {self.model}: {reason(error)}") from None
        except (
            openai.APITimeoutError,
            openai.RateLimitError,
            openai.InternalServerError,
            json.JSONDecodeError,
        ) as error:
            raise Rejected(f"no answer: {type(error).__name__}") from None
        except openai.APIConnectionError as error:
            raise UserError(f"--llm {self.url}: {reason(error)}; once it answers the same command goes on") from None
        except openai.APIStatusError as error:
            raise Rejected(f"refused by the endpoint: {reason(error)}") from None
        if not isinstance(reply, ChatCompletion) or not reply.choices:
            raise Rejected("no answer: a page of something else, as of a proxy")
        return reply
