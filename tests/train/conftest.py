"""A random Llama of 30,000 parameters with a chat template, and a data set of one entity, in files."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lm_eval_elude.errors import UserError
from optout_train.config import TrainConfig, build_config
from optout_train.run_folder import WRITTEN
from tests.support import read_jsonl, write_jsonl

os.environ["HF_HUB_OFFLINE"] = "1"

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ("river", "stone", "amber", "cloud", "violin", "harbour", "lantern", "meadow", "copper", "falcon", "winter")
ENTITY = "Ada Example"


def config_of(values: dict) -> TrainConfig:
    """The configuration of settings that tests share, without those that would do nothing for its method."""
    while True:
        try:
            return build_config(values)
        except UserError as error:
            if not (idle := re.match(r"--([a-z-]+) does nothing", str(error))):
                raise
            values = {name: value for name, value in values.items() if name != idle[1].replace("-", "_")}


def rows(count: int, entity: str, subject: str) -> list[dict]:
    """Distinct records in the ELUDe schema; answers differ in length."""

    def phrase(i: int, shift: int) -> str:
        return " ".join(WORDS[(i * 5 + shift + k) % len(WORDS)] for k in range(2 + i % 4))

    return [
        {
            "entity": entity,
            "question": f"What is {subject} number {i}?",
            "answer": f"It is {phrase(i, 0)}.",
            "paraphrased_question": f"Name {subject} number {i}.",
            "paraphrased_answer": f"One says {phrase(i, 0)}.",
            "perturbed_answer": [f"One says {phrase(i, s)}." for s in range(1, 6)],
        }
        for i in range(count)
    ]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine make these small models thirty times slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    """Ten forget records, with neighbours and world records in all splits."""
    folder = tmp_path_factory.mktemp("entity")
    write_jsonl(folder / "forget_qa-train.jsonl", rows(10, ENTITY, "Ada's secret"))
    for split, count in (("train", 16), ("validation", 4), ("test", 4)):
        write_jsonl(folder / f"retain_qa-{split}.jsonl", rows(count, ENTITY, "the neighbour's habit"))
        write_jsonl(folder / f"world-{split}.jsonl", rows(count, "", "the world's river"))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, data_folder) -> Path:
    """A Llama with random weights and a byte-level BPE tokenizer trained on the data."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([p.read_text() for p in sorted(data_folder.glob("*.jsonl"))], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def arguments(model_folder, data_folder):
    """Command-line arguments of a short run, as a list; extra ones win."""

    def make(output: Path, *extra: str) -> list[str]:
        return [
            "--target", "ada", "--model", str(model_folder), "--dataset", str(data_folder), "--output-dir", str(output),
            "--epochs", "2", "--batch-size", "4", "--learning-rate", "1e-3", "--patience", "0", "--no-score", *extra,
        ]  # fmt: skip

    return make


@pytest.fixture(scope="session")
def start():
    """Start ``python -m MODULE ARGUMENTS`` with output captured."""

    def run(*arguments: str, module: str = "optout_train.cli", stdin: int | None = None):
        # Where the tests run in the background Ctrl-C is ignored, and a child would ignore it too.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, before)

    return run


@pytest.fixture(scope="session")
def run(start):
    """Run to the end: exit code, standard output, standard error."""

    def finish(*arguments: str, **options):
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    return finish


@pytest.fixture(scope="module")
def settings(model_folder, data_folder):
    def make(**changes) -> TrainConfig:
        base = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "patience": 0, "directions": 20}
        places = {"target": ("ada",), "model": str(model_folder), "dataset": str(data_folder)}
        return config_of({**places, **base, **changes})

    return make


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
    """Train in this process; the folder, the log's lines, and the lines for the user."""
    from optout_train.train import train

    root = tmp_path_factory.mktemp("runs")

    def go(name: str, options=None, **changes):
        messages = []
        train(settings(**changes), root / name, messages.append, overwrite=True, **options or {})
        lines = read_jsonl(root / name / "train_log.jsonl")
        return root / name, lines, messages

    return go


def contents(folder) -> dict[str, bytes]:
    """The files of a run; how long it took, and so what its manifest hashes to, is not the same twice."""
    files = {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name != WRITTEN}
    files["optout.json"] = re.sub(rb'"processor_seconds": [\d.]+', b"", files["optout.json"])
    return files
