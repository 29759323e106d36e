"""The command ``optout-train``: flags to settings, model and data to a trainer, a run to a scored checkpoint."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from lm_eval_elude.data import bundled
from lm_eval_elude.errors import UserError, end_in_one_line, mute_imports, printable
from optout_train.presets import BUNDLED, METHODS, trainer_of

EPILOG = (
    "Every field of transformers' TrainingArguments is a flag, too (--lr_scheduler_type cosine, --report_to tensorboard, "
    "--optim ...): --help-all. A method's own settings win over the defaults, flags win over both. More processes: "
    "accelerate launch, torchrun."
)


@dataclass
class ModelArguments:
    """Which model is trained, and how."""

    model: str = bundled.MODEL_NAME
    revision: str = field(default="", metadata={"help": "Branch, tag or commit of a Hub model."})
    dtype: str = field(default="float32", metadata={"help": "Type of the weights: float32 or bfloat16."})
    lora: int = field(default=0, metadata={"help": "Rank of an adapter on all linear layers; 0: the weights train."})
    lora_alpha: float = field(default=0.0, metadata={"help": "Scale of the adapter; 0: twice its rank."})
    merge: bool = field(default=False, metadata={"help": "Save the adapter merged into the model."})


@click.command(epilog=EPILOG, context_settings={
    "ignore_unknown_options": True, "max_content_width": 110, "token_normalize_func": lambda name: name.replace("-", "_"),
})  # fmt: skip
@click.option("--target", multiple=True, metavar="NAME", help="Entity to forget: name, slug or alias; several times for several.")
@click.option("--model", help="The bundled model (tiny), a Hub id, or a folder.  [default: tiny]")
@click.option("--dataset", help="hub (published ELUDe), mini (bundled), or a folder in its schema.")
@click.option("--forget", metavar="DATA", help="Instead: what to forget, a file, folder or Hub id in TRL's formats;")
@click.option("--retain", metavar="DATA", help="what to keep;")
@click.option("--world", metavar="DATA", help="and general instructions.")
@click.option("--method", help="See --list-methods.  [default: opt-out]")
@click.option("--output_dir", help="[default: runs/TARGET-METHOD]")
@click.option("--learning_rate", type=float, help="Peak rate.  [default: the method's; the paper's 1e-5]")
@click.option("--num_train_epochs", type=float, help="Passes over the forget set.  [default: 3]")
@click.option("--per_device_train_batch_size", type=int, help="Forget records in a pass.  [default: 32]")
@click.option("--transport_weight", type=float, help="Lambda: weight of the distance from the original weights.")
@click.option("--lora", type=int, metavar="RANK", help="Train an adapter of this rank instead of the weights.")
@click.option("--resume_from_checkpoint", is_flag=False, flag_value="last", metavar="[PATH]", help="Go on with a run.")
@click.option("--config", metavar="FILE", help="YAML with any of the flags' names; flags win.")
@click.option("--overwrite", is_flag=True, help="Replace what is in --output_dir.")
@click.option("--no_score", is_flag=True, help="Leave out the table of before, after and retrained.")
@click.option("--list_methods", is_flag=True, help="Every method, in a sentence with its source.")
@click.option("--help_all", is_flag=True, help="Every flag.")
@click.argument("others", nargs=-1, type=click.UNPROCESSED, metavar="")
def command(
    others: tuple[str, ...], target: tuple[str, ...], config: str | None, overwrite: bool, no_score: bool,
    list_methods: bool, help_all: bool, **given: Any,
) -> None:  # fmt: skip
    """Make a language model forget an entity, and score it before and after."""
    if list_methods:
        for name, row in METHODS.items():
            click.echo(f"{name:26}{row['summary']} [{row['source']}]")
        return
    mute_imports()
    from transformers.hf_argparser import HfArgumentParser

    from optout_train.data import DataArguments
    from optout_train.trainer import UnlearnConfig

    parser = HfArgumentParser((DataArguments, ModelArguments, UnlearnConfig), prog="optout-train", allow_abbrev=False)
    if help_all:
        click.echo(parser.format_help())
        return
    words = read_config(config) if config else []
    words += [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    words += ["--target", *target] if target else []
    for word in others:
        name, is_flag, value = word.partition("=")
        words.append(name.replace("-", "_").replace("__", "--", 1) + is_flag + value if word.startswith("--") else word)
    for action in parser._actions:
        action.default = SUPPRESS  # what was given, and nothing else

    def refuse(message: str) -> None:
        raise UserError(message)

    parser.error = refuse
    settings = resolve(vars(parser.parse_args(words)))
    arguments = [kind(**{k: settings.pop(k) for k in [f.name for f in fields(kind)] if k in settings})
                 for kind in (DataArguments, ModelArguments)]  # fmt: skip
    run(*arguments, settings, overwrite=overwrite, no_score=no_score)


def read_config(path: str) -> list[str]:
    """The settings of a YAML file, as words of a command line."""
    import yaml

    words = []
    for name, value in (yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}).items():
        words += [f"--{name.replace('-', '_')}", *map(str, value if isinstance(value, list) else [value])]
    return words


def resolve(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run: those given, then the method's, then the bundled model's. UserError for an unknown method."""
    from optout_train.manifest import earlier_request

    method, model = given.get("method", "opt-out"), given.get("model", bundled.MODEL_NAME)
    if method not in METHODS:
        raise UserError(f"--method {method!r} is not known; optout-train --list-methods has them")
    if os.path.realpath(model) == str(bundled.MODEL):
        given["model"] = model = bundled.MODEL_NAME
    earlier = earlier_request(model)
    small = bundled.MODEL_NAME in (model, earlier and earlier.first_base)
    settings = (BUNDLED if small else {}) | ({"dataset": earlier.dataset} if earlier else {}) | METHODS[method]["settings"]
    if given.get("forget_split"):
        settings = settings | {"world_weight": 0.0, "early_stopping": False}
        settings.pop("dataset", None)
    if given.get("lora") == 0:
        settings = settings | {"merge": False}
    return {"method": method} | settings | given


def run(data: Any, chosen: ModelArguments, settings: dict[str, Any], *, overwrite: bool, no_score: bool) -> None:
    """Train, save, score. Under a launcher every process calls it; the first one speaks."""
    import torch
    from transformers import PrinterCallback
    from transformers.utils import cached_file

    from lm_eval_elude.model.scorer import load_model
    from lm_eval_elude.scoring.conventions import CONVENTIONS
    from lm_eval_elude.text.chat import Renderer, check_place, load_tokenizer
    from optout_train import manifest
    from optout_train.data import load_sets
    from optout_train.trainer import UnlearnConfig

    name, model_path = settings["method"], bundled.path_of(chosen.model)
    slug = data.forget_split or "+".join(target.replace(" ", "_").lower() for target in data.target)
    folder = Path(settings.setdefault("output_dir", f"runs/{slug}-{name}"))
    resume = settings.pop("resume_from_checkpoint", None)
    resume = last_checkpoint(folder) if resume == "last" else resume
    if (folder / "config.json").exists() and not (overwrite or resume):
        raise UserError(f"{folder} holds a run: give --overwrite, --resume_from_checkpoint or another --output_dir")
    settings.setdefault("disable_tqdm", not sys.stderr.isatty())
    args = UnlearnConfig(**settings)

    def say(line: str) -> None:
        if args.process_index == 0:
            click.echo(printable(line), err=True)

    refuse_unfit(chosen, args)
    sets = load_sets(data, args.weights, manifest.earlier_request(chosen.model), say)
    check_place(model_path)
    base = Path(cached_file(model_path, "config.json", revision=chosen.revision or None)).parent
    model = load_model(model_path, chosen.revision or None, getattr(torch, chosen.dtype))
    if getattr(model.config, "quantization_config", None) and (not chosen.lora or chosen.merge or args.transport_weight):
        raise UserError("--model is quantised: give --lora RANK and --transport_weight 0, or its weights in 16 bits")
    teacher = manifest.teacher_of(chosen.model)
    original = load_model(teacher, None, getattr(torch, chosen.dtype)) if teacher != model_path else None
    tokenizer = load_tokenizer(model_path, revision=chosen.revision or None)
    convention = CONVENTIONS[data.tofu_evaluator] if data.forget_split else None
    renderer = Renderer(tokenizer, convention.wording, convention.system) if convention else Renderer(tokenizer)
    if chosen.lora:
        from peft import LoraConfig, get_peft_model

        alpha = chosen.lora_alpha or 2 * chosen.lora
        adapter = LoraConfig(r=chosen.lora, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(args.seed)
        model = get_peft_model(model, adapter)
    if chosen.dtype == "bfloat16" and not chosen.lora and args.optim == UnlearnConfig.optim:
        args.optim, args.optim_args = "adamw_torch_8bit", "bf16_stochastic_round=True"  # else steps of 1e-5 are lost
    trainer = trainer_of(name)(
        model, args, sets, base=base, teacher=original and original.to(args.device), renderer=renderer,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume)
    if args.eval_on_start:
        metrics, first = trainer.evaluate(), trainer.state.log_history[0]
        if first["eval_forget_mc_accuracy"] < 0.5:
            say(f"warning: the model knew {first['eval_forget_mc_accuracy']:.0%} of the facts (17% by luck): its forget "
                "quality says nothing; `elude probe` says which")  # fmt: skip
        if abs(metrics["eval_forget_probability"] - first["eval_forget_probability"]) < 0.01:
            say("warning: the forget set is as likely as before: try a higher --learning_rate or more --num_train_epochs")
    if chosen.merge:
        trainer.model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    trainer.save_model()
    trainer.save_state()
    plain = {key: value for key, value in args.to_dict().items() if isinstance(value, int | float | str)}
    known = vars(data) | vars(chosen) | {key: value for key, value in plain.items() if is_own(args, key)}
    if args.process_index == 0:
        manifest.write(folder, chosen.model, base, sets, known, trainer.state.log_history)
    trainer.accelerator.wait_for_everyone()
    say(f"checkpoint: {folder}")
    before = {"pretrained": model_path, "dtype": chosen.dtype} | ({"revision": chosen.revision} if chosen.revision else {})
    after = before | {"peft": str(folder)} if chosen.lora and not chosen.merge else {"pretrained": str(folder), "dtype": chosen.dtype}
    if not no_score and not data.forget:
        from optout_train.score import score

        made = manifest.read_manifest(folder)
        words = ",".join(f"{key}={value}" for key, value in after.items())
        line = f"lm_eval --model elude --model_args {words} --tasks {'tofu' if data.forget_split else 'elude_quality'}"
        if text := score(folder, made, before, after, args.per_device_eval_batch_size):
            manifest.write_card(folder, made, text, line)
            click.echo(f"{text}\n\nAgain: {line}")


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint of a run: our own state is written last."""
    found = [path.parent for path in folder.glob("checkpoint-*/extra.pt")]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


def is_own(args: Any, key: str) -> bool:
    """Whether a setting says more than transformers' default."""
    from transformers import TrainingArguments

    return not hasattr(TrainingArguments, key) or getattr(args, key) != getattr(TrainingArguments, key)


def refuse_unfit(chosen: ModelArguments, args: Any) -> None:
    """UserError for what would be lost in silence."""
    if chosen.lora and METHODS[args.method].get("lora") is False:
        raise UserError(f"--method {args.method} changes the model's own weights: leave out --lora")
    if args.transport_weight and (args.fp16 or args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"):
        raise UserError("the distance's gradient needs DDP or FSDP2 in float32 or bf16: or give --transport_weight 0")
    import torch

    if torch.cuda.device_count() > 1 and args.world_size == 1:
        click.echo("one GPU is used; `accelerate launch -m optout_train.cli ...` uses all", err=True)


def main() -> None:
    """Run the command; its errors are lines."""
    less = "; give a smaller --per_device_train_batch_size, --gradient_checkpointing true or --lora"
    advice = {"UserError": "", "OutOfMemoryError": less}
    line = "interrupted; --resume_from_checkpoint goes on from the last checkpoint"
    end_in_one_line(lambda: command.main(prog_name="optout-train", standalone_mode=False), advice, line)


if __name__ == "__main__":
    main()
