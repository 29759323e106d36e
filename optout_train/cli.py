"""The command ``optout-train``: one flag for each field of the configuration, one line for each error."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from lm_eval_elude.errors import UserError, end_in_one_line, printable
from optout_train.config import AUTO, BUNDLED_RECIPE, CHOICES, METHODS, TrainConfig, build_config, flag

# What --help says of each flag, by section.
FLAGS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))
HELP = {name: text for section in FLAGS.values() for name, text in section.items()}


class _Sections(click.Command):
    """A command whose ``--help`` has a section for each of :data:`FLAGS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections; what no section names comes last."""
        shown = {option.name: record for option in self.get_params(ctx) if (record := option.get_help_record(ctx))}
        sections = [(title, [shown.pop(name) for name in names]) for title, names in FLAGS.items()]
        for title, records in [*sections, ("Other", list(shown.values()))]:
            with formatter.section(title):
                formatter.write_dl(records)


def _option(name: str, *names: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    settings.setdefault("help", HELP[name])
    return click.option(flag(name), *names, name, **settings)


def _config_options(command: Callable[..., None]) -> Callable[..., None]:
    special: dict[str, dict[str, Any]] = {name: {"type": click.Choice(choices)} for name, choices in CHOICES.items()}
    special["target"] = {"type": str, "multiple": True, "metavar": "NAME"}
    special["learning_rate"] = {"type": _rate, "metavar": f"FLOAT|{AUTO}"}
    for spec in reversed(fields(TrainConfig)):
        name, default = spec.name, spec.default
        if isinstance(default, bool):
            command = click.option(f"{flag(name)}/--no-{flag(name)[2:]}", name, default=None, help=HELP[name])(command)
            continue
        bundled = f"; bundled model: {BUNDLED_RECIPE[name]}" if name in BUNDLED_RECIPE else ""
        shown = f"{HELP[name]}  [default: {default}{bundled}]" if default not in ((), "") else HELP[name]
        settings = {"default": None, "type": type(default), "help": shown} | special.get(name, {})
        command = _option(name, *(["--lambda"] if name == "transport_weight" else []), **settings)(command)
    return command


def _rate(text: str) -> float | str:
    return text if text == AUTO else float(text)


@click.command(cls=_Sections, epilog=f"Methods: {', '.join(METHODS)}.", context_settings={"max_content_width": 110})
@_config_options
@_option("world_only", is_flag=True)
@_option("output_dir", type=click.Path(path_type=Path))
@_option("overwrite", is_flag=True)
@_option("resume", is_flag=True)
@_option("checkpoint_every", type=click.IntRange(min=0), default=0)
@_option("tracker", type=click.Choice(["tensorboard", "wandb", "trackio"]))
@_option("beside", type=click.Path(path_type=Path))
@_option("no_score", is_flag=True)
def command(
    world_only: bool, output_dir: Path | None, overwrite: bool, resume: bool, checkpoint_every: int,
    tracker: str | None, beside: Path | None, no_score: bool, **given: Any,
) -> None:  # fmt: skip
    """Make a language model forget an entity (Opt-Out and its baselines) and score it before and after."""
    named = {k: v for k, v in given.items() if v is not None and v != ()}
    config = build_config(_launched() | named, world_only=world_only)
    if overwrite and resume:
        raise UserError("--overwrite and --resume contradict each other")
    if beside:
        from optout_train.score import earlier

        earlier(beside)
    is_first = os.environ.get("RANK", "0") == "0"
    say: Callable[[str], object] = (lambda line: click.echo(printable(line), err=True)) if is_first else str
    if "model" not in named:
        say("no --model given: unlearning in the bundled tiny model")
    output = output_dir or _default_output(config)
    checkpoint, other = output.absolute(), beside and beside.absolute()
    if other and other.resolve() == checkpoint.resolve():
        raise UserError(f"--beside {beside} is the --output-dir itself; name another checkpoint")
    for name in ("torchao", "torch.utils._pytree"):  # what they say about themselves on import
        logging.getLogger(name).setLevel(logging.ERROR)
    if not no_score:
        from optout_train.score import must_be_scorable

        must_be_scorable(config)
    from optout_train.train import train

    trained = train(
        config, output, say, overwrite=overwrite, resume=resume, checkpoint_every=checkpoint_every,
        tracker=tracker or "",
    )  # fmt: skip
    if is_first and not no_score:
        from optout_train.score import is_scored

        no_score = is_scored(config, checkpoint, other)
    say(f"checkpoint: {output}" if trained else f"{output} is finished: nothing to {'do' if no_score else 'train'}")
    if is_first and not no_score:
        click.echo(_score(config, checkpoint, other))


def _launched() -> dict[str, Any]:
    """The flags that stand for what ``accelerate launch`` was configured with, which it says by environment variables.

    They are taken out of the environment: Accelerate would wrap the model a second time.
    """
    for plugin in ("DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true":
            raise UserError(f"accelerate launch is configured for {plugin}; take FSDP, or multi-GPU with --shard")
    if (precision := os.environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()) not in ("bf16", "no"):
        raise UserError(f"accelerate launch is configured for mixed precision {precision}; take bf16 or no")
    is_fsdp = os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return {name: True for name, is_on in (("shard", is_fsdp), ("autocast", precision == "bf16")) if is_on}


def _default_output(config: TrainConfig) -> Path:
    from optout_train.sources import source_of

    what_is_kept = "-retain" if config.learn == "retain" else ""
    return Path("runs") / f"{source_of(config).slug}-{config.method}{what_is_kept}"


def _score(config: TrainConfig, folder: Path, beside: Path | None) -> str:
    """The table; after several processes in an interpreter that knows of none, as lm-eval would wait for the others."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        from optout_train.score import score_run

        return score_run(config, folder, beside)
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)  # of which the other interpreter has need
    of_launcher = re.compile(r"TORCHELASTIC.*|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
    alone = {name: value for name, value in os.environ.items() if not of_launcher.fullmatch(name)}
    code = "from optout_train.cli import score_alone; score_alone()"
    words = [sys.executable, "-c", code, str(folder), *([str(beside)] if beside else [])]
    done = subprocess.run(words, env=alone, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # it has said why
        sys.exit(done.returncode)
    return done.stdout.rstrip()


def score_alone() -> None:
    """Score a finished run in an interpreter of its own; the arguments are its folder and the one beside it."""
    from optout_train.score import earlier, score_run

    run, *beside = map(Path, sys.argv[1:])
    _end(lambda: click.echo(score_run(TrainConfig.from_json(earlier(run).settings), run, *beside)))


def _end(run: Callable[[], object]) -> None:
    disk = "; a checkpoint that was written is whole: free the disk or check --output-dir, then --resume"
    less = "; give a smaller --micro-batch-size, --gradient-checkpointing or --lora"
    advice = {"UserError": "", "OSError": disk, "SafetensorError": disk, "OutOfMemoryError": less}
    end_in_one_line(run, advice, "interrupted; --resume goes on from the last checkpoint")


def main() -> None:
    """Run the command; its errors are lines."""
    # Threads that spin while they wait for each other make a run beside busy processes many times slower. The OpenMP
    # library reads this when torch is imported; how many threads there are, and so the bytes, does not change.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _end(lambda: command.main(prog_name="optout-train", standalone_mode=False))


if __name__ == "__main__":
    main()
