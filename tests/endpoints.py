"""A scripted OpenAI-compatible endpoint on loopback, for tests of whatever asks a language model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lm_eval_elude.llm import KNOCK

# What the endpoint does with a request: handler, user turn, and how many requests there were.
Act = Callable[["Endpoint", str, int], None]


def completion(content: object, finish: str = "stop") -> str:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


class Endpoint(BaseHTTPRequestHandler):
    """``server.act`` decides; ``server.tasks`` keeps the user turns in the order they came."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked, task = body, body["messages"][-1]["content"]
        with self.server.lock:
            self.server.tasks.append(task)
            count = len(self.server.tasks)
        # The client may be tired of waiting.
        with suppress(BrokenPipeError, ConnectionResetError):
            if task == KNOCK and not self.server.knocks:
                self.reply(200, completion("{}"))
            else:
                self.server.act(self, task, count)

    def reply(self, status: int, body: str | bytes, content_type: str = "application/json", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def endpoint(act: Act, knocks: bool = False) -> Iterator[tuple[str, list[str]]]:
    """A server whose answers ``act`` gives; also those to the first request where ``knocks``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.act, server.tasks, server.lock, server.knocks = act, [], threading.Lock(), knocks
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", server.tasks
    finally:
        server.shutdown()
        server.server_close()
