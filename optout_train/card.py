"""The model card of a scored checkpoint (``README.md`` with a model index) and the Hub's own evaluation results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.core.hub import CARD, RESULTS, Said, model_index, plain, results_yaml
from lm_eval_elude.core.manifest import Manifest, write_atomically
from optout_train.config import BUNDLED, TrainConfig
from optout_train.losses import FORGET
from optout_train.sources import benchmark_of

# By the group that scores: name, task or group, metric: what a card says of a checkpoint, gibberish beside forgetting.
SAID = {
    "elude_quality": (
        ("forget quality (FQ)", "elude_quality", "forget_quality"),
        ("retain quality (RQ)", "elude_quality", "retain_quality"),
        ("degenerate answers on the forget set", "elude_forget", "degenerate"),
        ("degenerate answers on the retain set", "elude_retain", "degenerate"),
    ),
    "tofu": (
        ("forget quality (KS p)", "tofu", "forget_quality"),
        ("model utility", "tofu", "model_utility"),
        ("degenerate answers on the forget set", "tofu_forget", "degenerate"),
        ("degenerate answers on the retain set", "tofu_retain", "degenerate"),
    ),
}
LIMITS = """\
- Nothing here shows that the targets were erased: it shows how the model answers the questions that were asked of it.
- FQ rewards gibberish. Read it beside the share of degenerate answers and beside a model that never saw the targets.
- The scores above are of plain questions. Attacks, membership inference and what else may bring the knowledge back were
  not tried by this run: for ELUDe's targets `lm_eval --tasks elude` asks them.
"""


def write_card(
    folder: Path, config: TrainConfig, manifest: Manifest, scored: Mapping[str, Mapping[str, Any]], again: str
) -> None:
    """Write the card, and for data of the Hub the evaluation results beside it.

    Args:
        folder: the checkpoint's.
        config: what was trained.
        manifest: of the checkpoint.
        scored: lm-eval's rows by name of the model; the last but any reference is this checkpoint's.
        again: the command that repeats its scores.
    """
    from huggingface_hub import ModelCardData

    own, data = scored["this checkpoint"], manifest.data
    benchmark = benchmark_of(config)
    said = SAID[benchmark.task]
    values = [Said(name, metric, v) for name, task, metric in said if (v := _value(own, task, metric)) is not None]
    place = data.get("repository") or manifest.dataset
    revision = data.get("revision")
    local = config.model == BUNDLED or Path(config.model).exists()
    metadata = ModelCardData(
        model_name=folder.name,
        base_model=None if local else config.model,
        datasets=[place] if "repository" in data else None,
        library_name="peft" if config.lora and not config.merge else "transformers",
        license="apache-2.0" if config.model == BUNDLED else None,
        pipeline_tag="text-generation",
        tags=["unlearning", "elude", manifest.method],
        eval_results=model_index(values, _name(place), revision, benchmark.name),
    )
    write_atomically(
        folder / CARD, f"---\n{metadata.to_yaml()}\n---\n\n{_text(folder, config, manifest, scored, again)}"
    )
    if "repository" in data:
        headline = [value for value in values if value.metric != "degenerate"]
        notes = f"forgotten: {benchmark.subject(manifest)}; {again}"
        file = folder / RESULTS.format(benchmark.name.lower())
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, results_yaml(headline, place, revision, notes, benchmark.name))


def _text(
    folder: Path, config: TrainConfig, manifest: Manifest, scored: Mapping[str, Mapping[str, Any]], again: str
) -> str:
    benchmark, done = benchmark_of(config), "made to forget"
    if FORGET[config.forget_loss].learns:
        done = "taught data with" if config.learn == "all" else "taught data without"
    prints = [f"- {_code(name)}: {_code(print_)}" for name, print_ in manifest.data_fingerprints.items()]
    source = ", ".join(f"{key} {_code(value)}" for key, value in manifest.data.items()) or _code(manifest.dataset)
    settings = [f"| {_code(name)} | {_code(value)} |" for name, value in manifest.settings.items() if value != ""]
    base, weights = manifest.base_model.get("name", ""), manifest.base_model.get("weights", {})
    hashes = [f"- {_code(file)}: {_code(digest)}" for file, digest in weights.items()]
    return "\n".join(
        [
            f"# {plain(folder.name)}", "",
            f"{_code(base)}, {done} {plain(benchmark.subject(manifest))} by {_code(manifest.method)} "
            "(lm-eval-elude). `optout.json` beside this file holds the whole provenance.", "",
            "## Scores", "", *_scores(SAID[benchmark.task], scored), "", f"Again: {_code(again)}", "",
            "## Limits", "", LIMITS, "## Data", "", f"Forgotten, kept and measured on: {source}. Fingerprints:", "",
            *prints, "", "## Base model", "", f"{_code(base)}, weights by SHA-256:", "", *hashes, "",
            "## Licence", "", f"The base model's licence holds for this model too. {benchmark.licence}", "",
            "## Settings", "", "| setting | value |", "|---|---|", *settings, "",
        ]
    )  # fmt: skip


def _scores(said: Sequence[tuple[str, str, str]], scored: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    rows = []
    for name, results in scored.items():
        values = [_value(results, task, metric) for _, task, metric in said]
        rows.append(f"| {name} | {' | '.join('–' if v is None else f'{100 * v:.1f}' for v in values)} |")
    return [f"| % | {' | '.join(name for name, _, _ in said)} |", f"|---|{'---:|' * len(said)}", *rows]


def _value(results: Mapping[str, Any], task: str, metric: str) -> float | None:
    value = results.get(task, {}).get(f"{metric},none")
    return float(value) if isinstance(value, int | float) and value == value else None


def _name(source: str) -> str:
    """A data set's name without the folders that it lies in."""
    return source if source.count("/") == 1 and not Path(source).exists() else Path(source).name


def _code(value: object) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).replace("|", "\\|").split())
    return f"`{text.replace('`', chr(39))}`"
