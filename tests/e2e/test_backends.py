"""Another backend of lm-eval, ``local-completions``, on a server that speaks OpenAI's completions with echo."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.data.bundled import MODEL
from tests.support import run


class Completions(BaseHTTPRequestHandler):
    """Greedy texts, or with ``echo`` the log-probabilities of the prompt's tokens and of one more."""

    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)

    @torch.no_grad()
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choices = []
        for index, prompt in enumerate(asked["prompt"]):
            ids = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=asked["max_tokens"], do_sample=False, pad_token_id=0
            )
            text = self.tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)
            for stop in asked.get("stop") or ():
                text = text.split(stop)[0]
            choices.append({"index": index, "text": text})
            if asked.get("echo"):
                logs = self.model(ids).logits[0, :-1].log_softmax(-1)
                chosen, best = logs.gather(1, ids[0, 1:, None])[:, 0].tolist(), logs.max(-1).values.tolist()
                top = [None, *({"": value} for value in best)]
                choices[-1]["logprobs"] = {"token_logprobs": [None, *chosen], "top_logprobs": top}
        body = json.dumps({"choices": choices}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/completions"
    server.shutdown()


def test_local_completions_gives_the_numbers_of_this_backend_but_those_of_single_tokens(url: str) -> None:
    metadata = {"pretrained": str(MODEL), "dataset": "mini", "target": "ronaldo"}
    remote = LocalCompletionsAPI(
        base_url=url, model="tiny", tokenizer=str(MODEL), tokenizer_backend="huggingface", batch_size=4, seed=0
    )
    theirs, ours = (
        run(["elude_forget"], model, metadata=metadata, limit=3, gen_kwargs="max_gen_toks=24", bootstrap_iters=0)
        for model in (remote, "elude")
    )
    theirs, ours = (results["results"]["elude_forget"] for results in (theirs, ours))
    numbers = {name: value for name, value in theirs.items() if isinstance(value, float)}
    assert {"probability,none", "truth_ratio,none", "rougeL_recall,none"} <= numbers.keys()
    assert numbers == pytest.approx({name: ours[name] for name in numbers}, abs=1e-4, nan_ok=True)
    absent = {"extraction_strength,none", "exact_memorization,none"}
    assert absent <= ours.keys() and not absent & theirs.keys()
