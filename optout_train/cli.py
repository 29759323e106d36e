"""The command ``optout-train``: flags to settings, model and data to a trainer, a run to a scored checkpoint."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from argparse import SUPPRESS
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click

from lm_eval_elude.data import bundled
from lm_eval_elude.errors import UserError, end_in_one_line, printable
from optout_train.presets import BUNDLED, METHODS, flag, trainer_of

EPILOG = (
    "Every field of transformers' TrainingArguments is a flag, too (--lr_scheduler_type cosine, --report_to "
    "tensorboard, --optim ...): --help_all. A method's own settings win over the defaults, flags win over both. More "
    "processes: accelerate launch, torchrun."
)


@dataclass
class ModelArguments:
    """Which model is trained, and how."""

    method: str = "opt-out"
    model: str = bundled.MODEL_NAME
    revision: str = flag("", "Branch, tag or commit of a Hub model.")
    dtype: str = flag("float32", "Type of the weights: float32 or bfloat16.")
    lora: int = flag(0, "Rank of an adapter on all linear layers; 0: the weights train.")
    lora_alpha: float = flag(0.0, "Scale of the adapter; 0: twice its rank.")
    merge: bool = flag(False, "Save the adapter merged into the model.")
    template: str = flag("", "Chat template by name where the model has several, or plain for none.")


@click.command(epilog=EPILOG, context_settings={
    "ignore_unknown_options": True, "max_content_width": 110,
    "token_normalize_func": lambda name: name.replace("-", "_"),
})  # fmt: skip
@click.option("--target", multiple=True, metavar="NAME", help="Entity to forget: name, slug or alias; may be repeated.")
@click.option("--model", help="The bundled model (tiny), a Hub id, or a folder.  [default: tiny]")
@click.option("--dataset", help="hub (published ELUDe), mini (bundled), rwku, or a folder in their schema.")
@click.option("--forget", metavar="DATA", help="Instead: what to forget, a file, folder or Hub id in TRL's formats;")
@click.option("--retain", metavar="DATA", help="what to keep;")
@click.option("--world", metavar="DATA", help="and general instructions.")
@click.option("--method", help="See --list_methods.  [default: opt-out]")
@click.option("--output_dir", help="[default: runs/TARGET-METHOD]")
@click.option("--learning_rate", help="Peak rate.  [default: the method's; the paper's 1e-5]")
@click.option("--num_train_epochs", help="Passes over the forget set.  [default: 3]")
@click.option("--per_device_train_batch_size", help="Forget records in a pass.  [default: 32]")
@click.option("--transport_weight", help="Lambda: weight of the distance from the original weights.  [default: 0.1]")
@click.option("--lora", metavar="RANK", help="Train an adapter of this rank instead of the weights.")
@click.option("--resume_from_checkpoint", is_flag=False, flag_value="last", metavar="[PATH]", help="Go on with a run.")
@click.option("--config", metavar="FILE", help="YAML with any of the flags' names; flags win.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --output_dir, with its checkpoints and scores.")
@click.option("--no_score", is_flag=True, help="Leave out the table of before, after and retrained.")
@click.option("--list_methods", is_flag=True, help="Every method, in a sentence with its source.")
@click.option("--help_all", is_flag=True, help="Every flag.")
@click.argument("others", nargs=-1, type=click.UNPROCESSED, metavar="")
def command(others, target, config, overwrite, no_score, list_methods, help_all, **given) -> None:
    """Make a language model forget an entity, and score it before and after."""
    if list_methods:
        for name, row in METHODS.items():
            click.echo(f"{name:26}{row['summary']} [{row['source']}]")
        return
    for name in ("torchao", "torch.utils._pytree"):  # what they say about themselves on import
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.hf_argparser import HfArgumentParser

    from optout_train.data import DataArguments
    from optout_train.trainer import UnlearnConfig

    parser: Any = HfArgumentParser((DataArguments, ModelArguments, UnlearnConfig), allow_abbrev=False)
    if help_all:
        click.echo(parser.format_help())
        return
    words = read_config(config) if config else []
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += ["--target", *target] if target else []
    for word in others:
        name, is_flag, value = word.partition("=")
        words.append("--" + name[2:].replace("-", "_") + is_flag + value if word.startswith("--") else word)
    for action in parser._actions:
        action.default = SUPPRESS  # what was given, and nothing else
    parser.error = refuse
    settings = resolve(vars(parser.parse_args(words)))
    data, chosen = [
        kind(**{f.name: settings.pop(f.name) for f in fields(kind) if f.name in settings})
        for kind in (DataArguments, ModelArguments)
    ]
    run(data, chosen, settings, overwrite, no_score)


def refuse(message: str) -> None:
    raise UserError(message)


def read_config(path: str) -> list[str]:
    """The settings of a YAML file, as words of a command line."""
    import yaml

    words = []
    for name, value in yaml.safe_load(Path(path).read_text(encoding="utf-8")).items():
        words += [f"--{name.replace('-', '_')}", *map(str, value if isinstance(value, list) else [value])]
    return words


def resolve(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run: those given, then the method's, then the bundled model's. UserError for an unknown method."""
    from lm_eval_elude.tasks.rwku import is_rwku
    from optout_train.manifest import earlier_request

    method, model = given.setdefault("method", "opt-out"), given.setdefault("model", bundled.MODEL_NAME)
    if method not in METHODS:
        raise UserError(f"--method {method!r} is not known; optout-train --list_methods has them")
    if os.path.realpath(model) == str(bundled.MODEL):
        given["model"] = model = bundled.MODEL_NAME
    earlier = earlier_request(model)
    settings = BUNDLED if bundled.MODEL_NAME in (model, earlier and earlier.first_base) else {}
    settings = settings | ({"dataset": earlier.dataset} if earlier else {}) | METHODS[method]["settings"]
    if "forget_split" in given:
        settings = settings | {"world_weight": 0.0, "dataset": "tofu"}
    elif is_rwku((settings | given).get("dataset", "")):
        settings = settings | {"world_weight": 0.0}
    return settings | given


def run(data: Any, chosen: Any, settings: dict[str, Any], overwrite: bool, no_score: bool) -> None:
    """Train, save, score. Under a launcher every process calls it; the first one speaks."""
    import warnings

    import torch
    from transformers import AutoConfig, PrinterCallback
    from transformers.utils import cached_file

    from lm_eval_elude.data.targets import slugify
    from lm_eval_elude.model.layers import with_adapter
    from lm_eval_elude.model.scorer import load_model
    from lm_eval_elude.tasks.tofu import EVALUATORS
    from lm_eval_elude.text.chat import Renderer, Texts, load_tokenizer
    from optout_train import manifest
    from optout_train.data import load_sets
    from optout_train.losses import LOSSES
    from optout_train.trainer import UnlearnConfig

    # transformers 5.23 asks its own models by the name that it calls deprecated.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
    method, path, revision = chosen.method, bundled.path_of(chosen.model), chosen.revision or None
    slug = data.forget_split or "+".join(map(slugify, data.target))
    folder = Path(settings.setdefault("output_dir", f"runs/{slug}-{method}"))
    resume = settings.pop("resume_from_checkpoint", None)
    whole = sorted(folder.glob("checkpoint-*/extra.pt"), key=os.path.getmtime)  # written last
    resume = (str(whole[-1].parent) if whole else None) if resume == "last" else resume
    if (folder / "config.json").exists() and not (overwrite or resume):
        raise UserError(f"{folder} holds a run: give --overwrite, --resume_from_checkpoint or another --output_dir")
    settings.setdefault("disable_tqdm", not sys.stderr.isatty())
    args = UnlearnConfig(**settings)
    for old in [*folder.glob("checkpoint-*"), folder / "scores"] if overwrite and args.process_index == 0 else ():
        shutil.rmtree(old, ignore_errors=True)

    def say(line: str) -> None:
        if args.process_index == 0:
            click.echo(printable(line), err=True)

    if chosen.lora and METHODS[method].get("lora") is False:
        raise UserError(f"--method {method} changes the model's own weights: leave out --lora")
    if args.transport_weight and (args.fp16 or args.deepspeed or "ACCELERATE_USE_DEEPSPEED" in os.environ):
        raise UserError("the distance's gradient needs DDP or FSDP2 in float32 or bf16: or give --transport_weight 0")
    if torch.cuda.device_count() > 1 and args.world_size == 1:
        say("one GPU is used; `accelerate launch -m optout_train.cli ...` uses all")
    sets = load_sets(data, args.weights, manifest.earlier_request(chosen.model), say)
    if sets.texts and LOSSES[args.loss].reads != ("answer",):
        raise UserError(f"--method {method} needs questions, and RWKU's passages have none: try --method npo+rt")
    tokenizer, dtype = load_tokenizer(path, revision=revision), getattr(torch, chosen.dtype)
    quantised = AutoConfig.from_pretrained(path, revision=revision).to_dict().get("quantization_config")
    kind = quantised and quantised.get("quant_method")
    if kind and (kind != "bitsandbytes" or not chosen.lora or chosen.merge or args.transport_weight):
        raise UserError(
            f"--model is quantised ({kind}): give its weights in 16 bits; with bitsandbytes, --lora RANK and a method "
            "without transport (--method npo+rt) also train an adapter"
        )
    model = load_model(path, revision, dtype)
    teacher = manifest.teacher_of(chosen.model)
    original = load_model(teacher, None, dtype).to(args.device) if teacher != path else None
    asked = EVALUATORS[data.tofu_evaluator] if data.forget_split else None
    wording, system = (asked.wording, asked.system) if asked else (None, "")
    renderer = Texts(tokenizer) if sets.texts else Renderer(tokenizer, wording, system, template=chosen.template)
    if renderer.remark:
        say(renderer.remark)
    end_as_trained(model.generation_config, renderer)
    if chosen.lora:
        torch.manual_seed(args.seed)
        model, left = with_adapter(model, chosen.lora, chosen.lora_alpha)
        if left:
            say(f"no adapter on {len(left)} modules that cannot have one: {left[0]}, ...")
    elif chosen.dtype == "bfloat16" and args.optim == UnlearnConfig.optim:
        args.optim, args.optim_args = "adamw_torch_8bit", "bf16_stochastic_round=True"  # else steps of 1e-5 are lost
    base = Path(str(cached_file(path, "config.json", revision=revision))).parent
    trainer = trainer_of(method)(
        model, args, sets, base=base, teacher=original, renderer=renderer, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    hub, args.push_to_hub = trainer.hub_model_id, False  # once, at the end, and without what was made of the records
    trainer.train(resume)
    if args.eval_on_start:
        last, first = trainer.evaluate(), trainer.state.log_history[0]
        if (known := first["eval_forget_mc_accuracy"]) < 0.5:
            say(f"warning: the model knew {known:.0%} of the facts (17% by luck): its forget quality says nothing")
        if abs(last["eval_forget_probability"] - first["eval_forget_probability"]) < 0.01:
            say("warning: the forget set is as likely as before: try a higher --learning_rate or --num_train_epochs")
    if chosen.lora and chosen.merge:
        trainer.model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    trainer.save_model()
    trainer.save_state()
    settings |= {"seed": args.seed, "learning_rate": args.learning_rate} | asdict(data) | asdict(chosen)
    if args.process_index == 0:
        manifest.write(folder, chosen.model, base, sets, settings, trainer.state.log_history)
    trainer.accelerator.wait_for_everyone()
    say(f"checkpoint: {folder}")
    del model, trainer, original
    if sets.texts:
        say(f"score it by: lm_eval --model elude --model_args pretrained={folder} --tasks rwku")
    elif not no_score and not data.forget:
        show_scores(folder, chosen, data, args.per_device_eval_batch_size)
    if hub and args.process_index == 0:
        from huggingface_hub import upload_folder

        upload_folder(repo_id=hub, folder_path=folder, ignore_patterns=["checkpoint-*", "*.pt"])


def end_as_trained(generation: Any, renderer: Any) -> None:
    """Let what the trained answers end with end the checkpoint's answers, too."""
    ends, added = generation.eos_token_id, renderer.tokenizer.get_added_vocab()
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    new = [added[stop] for stop in renderer.stop if stop in added and added[stop] not in ends]
    if new:
        generation.eos_token_id = [*ends, *new]


def show_scores(folder: Path, chosen: ModelArguments, data: Any, batch: int) -> None:
    """Score before, after and retrained; the first process writes the card and prints the table."""
    from optout_train import manifest
    from optout_train.score import score

    path = bundled.path_of(chosen.model)
    made, before = manifest.read_manifest(folder), {"pretrained": path, "dtype": chosen.dtype}
    before |= {"revision": chosen.revision} if chosen.revision else {}
    after = {"pretrained": str(folder), "dtype": chosen.dtype}
    after = before | {"peft": str(folder)} if chosen.lora and not chosen.merge else after
    task = "tofu" if data.forget_split else "elude_quality"
    again = f"lm_eval --model elude --model_args {','.join(map('='.join, after.items()))} --tasks {task}"
    if made and (text := score(folder, made, before, after, batch)):
        manifest.write_card(folder, made, text, again)
        click.echo(f"{text}\n\nAgain: {again}")


def main() -> None:
    """Run the command; its errors are lines."""
    less = "; give a smaller --per_device_train_batch_size, --gradient_checkpointing true or --lora"
    advice = {"UserError": "", "OutOfMemoryError": less}
    line = "interrupted; --resume_from_checkpoint goes on from the last checkpoint"
    end_in_one_line(lambda: command.main(prog_name="optout-train", standalone_mode=False), advice, line)


if __name__ == "__main__":
    main()
