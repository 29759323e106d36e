"""Servers on loopback that stand in for real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """A request's handler that logs nothing; what it knows lies on ``server``."""

    def reply(self, status: int, body: object, content_type: str = "application/json", **headers: str) -> None:
        """Text and bytes as they are, anything else as JSON."""
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        for key, value in ({"Content-Type": content_type, "Content-Length": str(len(data))} | headers).items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serve(handler: type[Handler], **state: Any) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """A server with this state on a free port: its address and itself."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(state, lock=threading.Lock())
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server
    finally:
        server.shutdown()
        server.server_close()


# What the endpoint does with a request: handler, user turn, and how many requests there were.
Act = Callable[["Endpoint", str, int], None]


def completion(content: object, finish: str = "stop") -> str:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


class Endpoint(Handler):
    """``server.act`` decides; ``server.tasks`` keeps the user turns in the order they came."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked, task = body, body["messages"][1]["content"]
        with self.server.lock:
            self.server.tasks.append(task)
            count = len(self.server.tasks)
        # The client may be tired of waiting.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.server.act(self, task, count)


@contextmanager
def endpoint(act: Act) -> Iterator[tuple[str, list[str]]]:
    """A server whose answers ``act`` gives, and the tasks that it was asked."""
    with serve(Endpoint, act=act, tasks=[]) as (place, server):
        yield f"{place}/v1", server.tasks
