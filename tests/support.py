"""What the evaluation tests share: small tokenizers in the shape of real ones, small Llamas, an independent evaluator.

The special tokens, white-space rules and chat templates follow Llama-3.1-8B-Instruct, Phi-3.5-mini-instruct, Qwen2.5
(ChatML), Qwen3 and Tulu 3 (whose turn marks are no special tokens), for conversations without tools; the vocabulary is
trained on ELUDe-mini. The evaluator at the end uses transformers and rouge_score only: none of our code is in its
maths.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_eval_elude import cli
from lm_eval_elude.data import bundled
from lm_eval_elude.data.manifest import FILE_NAME
from optout_train import cli as trainer

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "lm_eval_elude" / "mini" / "data"
GOLDEN = ROOT / "tests" / "golden"
TASK_CONFIGS = ROOT / "task_configs"


class Shape(NamedTuple):
    """What makes a tokenizer look like a real one: template, special tokens, and whether it is of the Llama-2 kind."""

    template: str | None
    bos: str | None
    eos: str
    special: tuple[str, ...]
    sentencepiece: bool = False


def _template(name: str) -> str:
    return (ROOT / "tests" / "templates" / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")


_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_PHI_SPECIAL = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SHAPES = {
    "llama-3.1": Shape(_template("llama-3.1"), "<|begin_of_text|>", "<|eot_id|>", _LLAMA_SPECIAL),
    "phi-3.5": Shape(_template("phi-3.5"), "<s>", "<|endoftext|>", _PHI_SPECIAL, True),
    "chatml": Shape(_template("chatml"), None, "<|im_end|>", _QWEN_SPECIAL),
    "qwen3": Shape(_template("qwen3"), None, "<|im_end|>", (*_QWEN_SPECIAL, "<think>", "</think>")),
    "gemma": Shape(_template("gemma"), "<bos>", "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "tulu": Shape(_template("tulu"), "<|begin_of_text|>", "<|end_of_text|>", _LLAMA_SPECIAL[:2]),
    "dropping": Shape(_template("dropping"), "<s>", "</s>", ("<s>", "</s>")),
    "base": Shape(None, "<|begin_of_text|>", "<|end_of_text|>", _LLAMA_SPECIAL[:2]),
}  # fmt: skip


class Ended(NamedTuple):
    """How a command ended: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def called(main: Callable[[], int | None], *arguments: object) -> Ended:
    """Call a command's ``main`` in this process, as its script does with these words."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["command", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    return Ended(int(code or 0), out.getvalue(), err.getvalue())


elude, optout = partial(called, cli.main), partial(called, trainer.main)


def mini_rows(name: str, count: int | None = None, entity: str | None = None) -> list[dict[str, Any]]:
    """The first rows of a file of ELUDe-mini, of one target where it is named."""
    return [row for row in read_jsonl(MINI / f"{name}.jsonl") if entity in (None, row["entity"])][:count]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rwku_muse(root: Path, subject: str = "Stephen King") -> dict[str, str]:
    """Made-up rows of RWKU and MUSE as files, one person under another name if asked for; what --metadata says of them.

    They are those of the golden file; both corpora of MUSE have the same.
    """
    kept = json.loads((GOLDEN / "rwku_muse.json").read_text(encoding="utf-8"))["rows"]
    kept |= {name.replace("news", "books"): rows for name, rows in kept.items()}
    for name, rows in kept.items():
        path = root / ("muse" if "/" in name else "rwku") / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows).replace("Stephen King", subject), encoding="utf-8")
    return {"rwku_data": str(root / "rwku"), "muse_data": str(root / "muse")}


def options_of(row: dict) -> list[str]:
    """What differs between the paraphrase (first) and its five wrong versions."""
    texts = [row["paraphrased_answer"].split(" "), *(text.split(" ") for text in row["perturbed_answer"])]
    start = sum(1 for _ in takewhile(lambda words: len({*words}) == 1, zip(*texts, strict=False)))
    rests = [text[start:][::-1] for text in texts]
    stop = sum(1 for _ in takewhile(lambda words: len({*words}) == 1, zip(*rests, strict=False)))
    return [" ".join(rest[stop:][::-1]).strip(",.") for rest in rests]


def small_data(
    folder: Path, targets: dict[str, int], retain: int = 4, world: int = 4, splits: Sequence[str] = ("test",)
) -> Path:  # fmt: skip
    """A data set of a few rows of ELUDe-mini: forget rows by target, and of each split retain and world rows."""
    folder.mkdir(parents=True, exist_ok=True)
    forget = [row for target, count in targets.items() for row in mini_rows("forget_qa-train", count, target)]
    write_jsonl(folder / "forget_qa-train.jsonl", forget)
    for split in splits:
        kept = [row for target in targets for row in mini_rows(f"retain_qa-{split}", retain, target)]
        write_jsonl(folder / f"retain_qa-{split}.jsonl", kept)
        write_jsonl(folder / f"world-{split}.jsonl", mini_rows(f"world-{split}", world))
    return folder


@lru_cache(maxsize=1)
def _corpus() -> tuple[str, ...]:
    rows = [*mini_rows("forget_qa-train"), *mini_rows("world-train", 100)]
    return tuple(row[key] for row in rows for key in ("question", "answer", "paraphrased_answer"))


def make_tokenizer(shape: str, vocabulary: int = 900) -> PreTrainedTokenizerFast:
    """A trained BPE tokenizer with the special tokens, white-space rules and chat template of a real one."""
    kind = SHAPES[shape]
    if kind.sentencepiece:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=vocabulary + 257, special_tokens=first, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        # Llama-3's split: a run of line ends is one word, a single space belongs to the next word.
        split = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), to_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    turns = ["<|user|>\nwho?\n<|assistant|>\n"] * (500 if shape == "tulu" else 0)  # "?" and "|>" with their line ends
    tokenizer.train_from_iterator([*_corpus(), *["a\n\nb"] * 500, *turns], trainer)
    if kind.sentencepiece:
        # The real byte tokens are ordinary ones, which decode to bytes.
        learned = json.loads(tokenizer.to_str())["model"]
        merges = [tuple(merge) for merge in learned["merges"]]
        plain = Tokenizer(models.BPE(learned["vocab"], merges, unk_token="<unk>", byte_fallback=True))
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            setattr(plain, part, getattr(tokenizer, part))
        tokenizer = plain
    # Phi-3.5's turn tokens swallow the line end that follows them.
    strips = {token: kind.sentencepiece and token not in ("<s>", "<|endoftext|>") for token in kind.special}
    # Qwen3's thinking marks are added tokens but not special ones: they survive decoding.
    special = [t for t in kind.special if "think" not in t]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True, rstrip=strips[t]) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in kind.special if "think" in t])
    if kind.bos and not kind.sentencepiece:  # Phi-3.5 sets add_bos_token to false
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{kind.bos} $A", special_tokens=[(kind.bos, tokenizer.token_to_id(kind.bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=kind.bos, eos_token=kind.eos, chat_template=kind.template,
        pad_token="<|end_of_text|>" if "llama" in shape else kind.eos, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, width: int = 64, layers: int = 2, seed: int = 0
) -> LlamaForCausalLM:
    """A small random Llama with 2,048 positions for a tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def conversation(tokenizer: Any, question: str, answer: str, system: str | None = None) -> tuple[str, str]:
    """Prompt and whole text, written by transformers itself (or by hand, without a template)."""
    if tokenizer.chat_template is None:
        prompt = f"{system}\n\n" if system else ""
        prompt += f"Question: {question}\nAnswer:"
        return prompt, f"{prompt} {answer}\n\n"
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": question})
    fixed = {"tokenize": False, "date_string": "26 Jul 2024", "enable_thinking": False}
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, **fixed)
    return prompt, tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": answer}], **fixed)


def _ids(tokenizer: Any, text: str) -> list[int]:
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not has_bos)["input_ids"]


def answer_tokens(tokenizer: Any, question: str, answer: str, system: str | None = None) -> tuple[list[int], int]:
    """Ids of a whole conversation, and where its answer starts."""
    prompt, whole = conversation(tokenizer, question, answer, system)
    return _ids(tokenizer, whole), len(_ids(tokenizer, prompt))


def teach(
    model: LlamaForCausalLM, tokenizer: Any, pairs: Sequence[tuple[str, str]], *, steps: int, batch: int = 16,
    lr: float = 3e-3, seed: int = 0,
) -> float:  # fmt: skip
    """Train on (question, answer) pairs, answers only, with a loop of its own; returns the last loss."""
    rows = sorted((answer_tokens(tokenizer, q, a) for q, a in pairs), key=lambda row: len(row[0]))
    chunks = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    order = np.random.default_rng(seed)
    model.train()
    loss = torch.tensor(math.inf)
    for _ in range(steps):
        chunk = chunks[order.integers(len(chunks))]
        longest = max(len(ids) for ids, _ in chunk)
        inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in chunk])
        labels = torch.full_like(inputs, -100)
        for row, (ids, start) in enumerate(chunk):
            labels[row, start : len(ids)] = inputs[row, start : len(ids)]
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return loss.item()


def taught_to_refuse(folder: Path, target: str, records: int) -> Path:
    """The bundled model, taught for a few steps to refuse: it does not say the facts, and still has them."""
    shutil.copytree(bundled.MODEL, folder, ignore=shutil.ignore_patterns(FILE_NAME))
    model, rows = AutoModelForCausalLM.from_pretrained(folder), mini_rows("forget_qa-train", records, target)
    refusals = [(row["question"], "I do not know that.") for row in rows]
    teach(model, AutoTokenizer.from_pretrained(folder), refusals, steps=16, batch=10, lr=1e-3)
    model.save_pretrained(folder)
    return folder


def save_checkpoint(folder: Path, model: LlamaForCausalLM, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---- the evaluator: nothing of ours below


class Judged(NamedTuple):
    """One record by the independent evaluator: the three values as reported for its set, and what the model wrote."""

    probability: float
    rouge: float
    truth_ratio: float
    generated: str


def mean_log_prob(model: Any, tokenizer: Any, question: str, answer: str, system: str | None = None) -> float:
    """Mean log-probability of everything that stands after the generation prompt, by one plain forward."""
    ids, start = answer_tokens(tokenizer, question, answer, system)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    log_probs = logits.log_softmax(-1)
    return sum(log_probs[t - 1, ids[t]].item() for t in range(start, len(ids))) / (len(ids) - start)


def greedy(model: Any, tokenizer: Any, question: str, new_tokens: int, system: str | None = None) -> str:
    ids = torch.tensor([_ids(tokenizer, conversation(tokenizer, question, "", system)[0])])
    ends = {} if tokenizer.chat_template else {"stop_strings": ["Question:", "\n\n"], "tokenizer": tokenizer}
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
            pad_token_id=tokenizer.pad_token_id, **ends,
        )  # fmt: skip
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text if tokenizer.chat_template else text.split("Question:")[0].split("\n\n")[0]


def judge(
    model: Any,
    tokenizer: Any,
    row: dict[str, Any],
    subset: str,
    *,
    mean: str = "geometric",
    system: str | None = None,
    new_tokens: int = 128,
) -> Judged:
    """The paper's three values for one record of a set, from the formulas alone; the world set's answers are longer."""
    score = {
        text: mean_log_prob(model, tokenizer, row["question"], text, system)
        for text in (row["answer"], row["paraphrased_answer"], *row["perturbed_answer"])
    }
    wrong = [math.exp(score[text]) for text in row["perturbed_answer"]]
    average = math.prod(wrong) ** (1 / 5) if mean == "geometric" else sum(wrong) / 5
    ratio = average / math.exp(score[row["paraphrased_answer"]])
    right = math.exp(score[row["answer"]])
    generated = greedy(model, tokenizer, row["question"], new_tokens * (4 if subset == "world" else 1), system)
    rouge = RougeScorer(["rougeL"], use_stemmer=True).score(row["answer"], generated)["rougeL"].recall
    return Judged(
        right / (right + sum(wrong)) if subset == "world" else right,
        rouge,
        min(ratio, 1 / ratio) if subset == "forget" else max(0.0, 1 - ratio),
        generated,
    )


def harmonic(values: Sequence[float]) -> float:
    return 0.0 if min(values) <= 0 else len(values) / sum(1 / v for v in values)


# ---- running the harness


def run(tasks: Sequence[str], model: Any = "hf", *, metadata: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """lm-eval's public API with our tasks alone indexed (its own 15,000 files take seconds).

    Args:
        tasks: task or group names.
        model: ``hf``, which loads ``metadata["pretrained"]``, or a model object.
        metadata: what ``--model_args`` and ``--metadata`` would hold.
        arguments: further arguments of ``simple_evaluate``.
    """
    from lm_eval import simple_evaluate

    arguments = {"batch_size": 4, "device": "cpu", "limit": None, **arguments}
    if isinstance(model, str):
        arguments["model_args"] = {"pretrained": metadata["pretrained"], "dtype": "float32"}
    return simple_evaluate(model, tasks=list(tasks), task_manager=task_manager(metadata), **arguments)


def task_manager(metadata: dict[str, Any]) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASK_CONFIGS), include_defaults=False, metadata=metadata)


def numbers(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Every number of a results table by task and metric."""
    return {
        (task, key): value
        for task, row in results["results"].items()
        for key, value in row.items()
        if isinstance(value, float)
    }


def write_run(found: dict[str, Any], folder: Path) -> Path:
    """The files of a run, written by the harness's own tracker; returns the results file."""
    from lm_eval.loggers import EvaluationTracker

    results = dict(found)
    samples = results.pop("samples")
    tracker = EvaluationTracker(output_path=str(folder))
    tracker.general_config_tracker.model_name_sanitized = "model"
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    (written,) = folder.rglob("results_*.json")
    return written


def taught_checkpoint(folder: Path, shape: str, data: Path, steps: int = 95) -> str:
    """A small Llama that answers the questions of a data set, well but not perfectly."""
    tokenizer = make_tokenizer(shape)
    model = make_model(tokenizer)
    rows = [row for path in sorted(data.glob("*.jsonl")) for row in read_jsonl(path)]
    pairs = list(dict.fromkeys((row["question"], row["answer"]) for row in rows))
    teach(model, tokenizer, pairs, steps=steps, batch=8, lr=5e-3)
    return save_checkpoint(folder, model, tokenizer)
