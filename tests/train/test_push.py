"""``--push_to_hub`` against a local server that answers the Hub's calls."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support import small_data


class Hub(BaseHTTPRequestHandler):
    """Takes commits; every file is uploaded within the commit."""

    files: dict[str, bytes]
    created: list[str]

    def do_GET(self):
        known = {"name": "somebody", "type": "user", "auth": {}, "orgs": [], "siblings": [], "id": "somebody/forgot"}
        self.answer(known)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith("/repos/create"):
            self.created.append(json.loads(body)["name"])
            self.answer({"url": f"http://{self.headers['Host']}/somebody/forgot", "name": "somebody/forgot"})
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/somebody/forgot/commit/{'0' * 40}"
            self.answer({"success": True, "commitUrl": url, "commitOid": "0" * 40})
        else:
            self.answer({"errors": [], "warnings": []})

    def answer(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    handler = type("Handler", (Hub,), {"files": {}, "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, handler
    server.shutdown()


@pytest.mark.slow
def test_weights_card_and_manifest_are_pushed(hub, tmp_path):
    port, taken = hub
    data = small_data(tmp_path / "data", {"Cristiano Ronaldo": 3}, splits=("train", "validation", "test"))
    environment = dict(os.environ) | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": "hf_x"}
    environment.pop("HF_HUB_OFFLINE", None)
    flags = [
        "--target",
        "ronaldo",
        "--dataset",
        data,
        "--method",
        "npo+rt",
        "--num_train_epochs",
        1,
        "--push_to_hub",
        "true",
        "--hub_model_id",
        "somebody/forgot",
        "--output_dir",
        tmp_path / "out",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "optout_train.cli", *map(str, flags)], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert taken.created and {"model.safetensors", "optout.json", "README.md", "tokenizer.json"} <= taken.files.keys()
    assert taken.files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    card = taken.files["README.md"].decode()
    assert card == (tmp_path / "out" / "README.md").read_text() and "npo+rt" in card
    assert not [name for name in taken.files if "checkpoint-" in name or name.endswith(".pt")]
