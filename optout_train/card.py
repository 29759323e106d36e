"""The model card of a scored checkpoint (``README.md`` with a model index) and the Hub's own evaluation results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_elude.data.hub_metadata import CARD, RESULTS, Headline, model_index, plain, results_yaml
from lm_eval_elude.data.manifest import Manifest
from lm_eval_elude.scoring.units import NONE, unit, with_unit
from optout_train.config import TrainConfig
from optout_train.sources import benchmark_of

TEXT = Path(__file__).with_name("card.md")
CHECKPOINT, REFERENCE = "this checkpoint", "retrained without"  # rows of the table of scores


def card_files(
    folder: Path, config: TrainConfig, manifest: Manifest, scored: Mapping[str, Mapping[str, Any]], again: str
) -> dict[str, str]:
    """The text of the card, and for data of the Hub of the evaluation results beside it, by file name.

    ``scored`` has lm-eval's rows by name of the model; ``again`` is the command that repeats them.
    """
    from huggingface_hub import ModelCardData

    data, benchmark = manifest.data, benchmark_of(config)
    # What a card says of a checkpoint: gibberish and what is still known stand beside forgetting.
    numbers = [(metric.replace("_", " "), benchmark.task, metric) for _, metric, _ in benchmark.halves]
    forgotten = benchmark.halves[0][2]
    numbers += [("truth still likeliest", forgotten, "truth_first"), ("log R", forgotten, "log_truth_ratio")]
    numbers += [(f"degenerate answers, {title}", task, "degenerate") for title, _, task in benchmark.halves]
    values = {model: [value_in(rows, task, m) for _, task, m in numbers] for model, rows in scored.items()}
    names = [name for name, _, _ in numbers]
    never_knew = dict(zip(names, values.get(REFERENCE, ()), strict=False))
    units = {name: _unit(task, metric) for name, task, metric in numbers}
    known = {name: with_unit(value, units[name]) for name, value in never_knew.items() if value is not None}
    headlines = [
        Headline(f"{name} (never knew: {known[name]})" if name in known else name, metric, value)
        for (name, _, metric), value in zip(numbers, values[CHECKPOINT], strict=True)
        if value is not None
    ]
    reference = ", ".join(f"{name} {value}" for name, value in known.items()) or "not scored"
    repository, revision = data.get("repository"), data.get("revision")
    place = repository or Path(manifest.dataset).name
    metadata = ModelCardData(
        model_name=folder.name,
        base_model=None if config.bundled or Path(config.model).exists() else config.model,
        datasets=[place] if repository else None,
        library_name="peft" if config.lora and not config.merge else "transformers",
        license="apache-2.0" if config.bundled else None,
        pipeline_tag="text-generation",
        tags=["unlearning", "elude", manifest.method],
        eval_results=model_index(headlines, place, revision, benchmark.name),
    )
    done = "made to forget"
    if config.loss.learns:
        done = "taught data with" if config.learn == "all" else "taught data without"
    head = [f"|  | {' | '.join(names)} |", f"|---|{'---:|' * len(numbers)}"]
    rows = [f"| {model} | {' | '.join(map(_cell, row, units.values()))} |" for model, row in values.items()]
    weights = manifest.base_model.get("weights", {})
    text = TEXT.read_text(encoding="utf-8").format(
        title=plain(folder.name),
        base=_code(manifest.base_model.get("name", "")),
        done=done,
        subject=plain(benchmark.subject(manifest)),
        method=_code(manifest.method),
        scores="\n".join([*head, *rows]),
        reference=f"A model that never knew: {reference}.",
        again=_code(again),
        source=", ".join(f"{key} {_code(value)}" for key, value in data.items()) or _code(manifest.dataset),
        fingerprints="\n".join(f"- {_code(name)}: {_code(v)}" for name, v in manifest.data_fingerprints.items()),
        weights="\n".join(f"- {_code(name)}: {_code(digest)}" for name, digest in weights.items()),
        licence=benchmark.licence,
        settings="\n".join(f"| {_code(k)} | {_code(v)} |" for k, v in manifest.settings.items() if v != ""),
    )
    files = {CARD: f"---\n{metadata.to_yaml()}\n---\n\n{text}"}
    if repository:
        qualities = [value for value in headlines if value.metric in [metric for _, metric, _ in benchmark.halves]]
        notes = f"forgotten: {benchmark.subject(manifest)}; never knew: {reference}; {again}"
        files[RESULTS.format(benchmark.name.lower())] = results_yaml(qualities, place, revision, notes, benchmark.name)
    return files


def value_in(rows: Mapping[str, Any], task: str, metric: str) -> float | None:
    """A number of lm-eval's results by task; None where there is none."""
    value = rows.get(task, {}).get(f"{metric},none")
    return float(value) if isinstance(value, int | float) and value == value else None


def _unit(task: str, metric: str) -> str:
    return "p-value" if (task, metric) == ("tofu", "forget_quality") else unit(metric)  # TOFU's, of the KS test


def _cell(value: float | None, unit: str) -> str:
    return NONE if value is None else with_unit(value, unit)


def _code(value: object) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).replace("|", "\\|").split())
    return f"`{text.replace('`', chr(39))}`"
