"""The command ``optout-train``: one flag for each field of the configuration, one line for each error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click

from optout_train.config import BUNDLED_RECIPE, METHODS, ConfigError, TrainConfig, build_config, flag


def _config_options(command: Callable[..., None]) -> Callable[..., None]:
    for spec in reversed(fields(TrainConfig)):
        assert spec.default is not MISSING
        name, default, help = flag(spec.name), spec.default, spec.metadata["help"]
        shown = "" if default in ((), "") or isinstance(default, bool) else f"  [default: {_shown(spec.name, default)}]"
        settings: dict[str, Any] = {"default": None, "help": f"{help}{shown}"}
        if isinstance(default, bool):
            command = click.option(f"{name}/--no-{name[2:]}", spec.name, **settings)(command)
        elif isinstance(default, tuple):
            command = click.option(name, spec.name, multiple=True, metavar="NAME", **settings)(command)
        elif spec.name == "transport_weight":
            command = click.option(name, "--lambda", spec.name, type=float, **settings)(command)
        else:
            kind = click.Choice(spec.metadata["choices"]) if spec.metadata["choices"] else type(default)
            command = click.option(name, spec.name, type=kind, **settings)(command)
    return command


def _shown(name: str, default: Any) -> str:
    return f"{default}; bundled model: {BUNDLED_RECIPE[name]}" if name in BUNDLED_RECIPE else str(default)


# The sections of ``--help``, a newcomer's flags first.
GROUPS = {
    "Start here": ("target", "model", "dataset", "method", "output_dir", "resume", "overwrite"),
    "Model": (
        "revision", "dtype", "autocast", "lora", "lora_rank", "lora_alpha", "merge", "gradient_checkpointing",
        "compile",
    ),
    "Data": ("forget_split", "tofu_evaluator", "learn", "strict"),
    "Objective": (
        "forget_loss", "forget_weight", "retain_weight", "world_weight", "world_only", "transport_weight", "distance",
        "directions", "eta", "recipe", "npo_form", "nll_average", "self_distill",
    ),
    "Stranger loss": ("answers", "bound", "elicit", "teachers", "reverse"),
    "Schedule": (
        "epochs", "batch_size", "micro_batch_size", "updates", "learning_rate", "weight_decay", "decay_vectors",
        "max_grad_norm", "clip_forget", "validate", "patience", "seed",
    ),
    "Output": ("checkpoint_every", "tracker", "beside", "no_score"),
    "Distributed": ("shard",),
}  # fmt: skip


class _Grouped(click.Command):
    """A command whose ``--help`` has a section for each of :data:`GROUPS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections; what no section names comes last."""
        shown = {option.name: record for option in self.get_params(ctx) if (record := option.get_help_record(ctx))}
        sections = [(title, [shown.pop(name) for name in names]) for title, names in GROUPS.items()]
        for title, records in [*sections, ("Other", list(shown.values()))]:
            with formatter.section(title):
                formatter.write_dl(records)


@click.command(cls=_Grouped, epilog=f"Methods: {', '.join(METHODS)}.", context_settings={"max_content_width": 110})
@_config_options
@click.option("--world-only", is_flag=True, help="No neighbours: the world set alone keeps the rest.")
@click.option("--output-dir", type=click.Path(path_type=Path), help="[default: runs/TARGET-METHOD, or SPLIT-METHOD]")
@click.option("--overwrite", is_flag=True, help="Replace an existing run.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run; start if there is none.")
@click.option(
    "--checkpoint-every", type=click.IntRange(min=0), default=0, help="Steps between checkpoints  [default: an epoch]"
)
@click.option("--tracker", type=click.Choice(["tensorboard", "wandb", "trackio"]), help="Also log there.")
@click.option("--beside", type=click.Path(path_type=Path), help="Score this checkpoint too, in the same table.")
@click.option("--no-score", is_flag=True, help="Skip the scores before and after.")
def command(
    world_only: bool, output_dir: Path | None, overwrite: bool, resume: bool, checkpoint_every: int,
    tracker: str | None, beside: Path | None, no_score: bool, **given: Any,
) -> None:  # fmt: skip
    """Make a language model forget an entity (Opt-Out and its baselines) and score it before and after."""
    named = {k: v for k, v in given.items() if v is not None and v != ()}
    config = build_config(_launched() | named, world_only=world_only)
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume contradict each other")
    if beside:
        from optout_train.score import earlier

        earlier(beside)
    main = os.environ.get("RANK", "0") == "0"
    say: Callable[[str], None] = (lambda line: click.echo(line, err=True)) if main else (lambda line: None)
    if "model" not in {k for k, v in given.items() if v is not None}:
        say("no --model given: unlearning in the bundled tiny model")
    output = output_dir or _default_output(config)
    for name in ("torchao", "torch.utils._pytree"):  # they warn about their own insides while being imported
        logging.getLogger(name).setLevel(logging.ERROR)
    from optout_train.loop import RunOptions, train

    trained = train(config, RunOptions(output, overwrite, resume, checkpoint_every, tracker or ""), say)
    scored = no_score or (not trained and any((output / "scores" / "after").glob("results_*.json")))
    finished = f"{output} is finished: nothing to {'do' if scored else 'train'}"
    say(f"checkpoint: {output}" if trained else finished)
    if main and not scored:
        click.echo(_score(config, output.absolute(), beside and beside.absolute()))


def _launched() -> dict[str, Any]:
    """The flags that stand for what ``accelerate launch`` was configured with, which it says by environment variables.

    They are taken out of the environment: Accelerate would wrap the model a second time.
    """
    for plugin in ("DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true":
            raise ConfigError(f"accelerate launch is configured for {plugin}; take FSDP, or multi-GPU with --shard")
    found = {}
    if os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true":
        found["shard"] = True
    if (precision := os.environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()) == "bf16":
        found["autocast"] = True
    elif precision != "no":
        raise ConfigError(f"accelerate launch is configured for mixed precision {precision}; take bf16 or no")
    return found


def _default_output(config: TrainConfig) -> Path:
    from optout_train.sources import source_of

    known = "-retain" if config.learn == "retain" else ""
    return Path("runs") / f"{source_of(config).slug}-{config.method}{known}"


def _score(config: TrainConfig, folder: Path, beside: Path | None) -> str:
    """The table; after several processes in an interpreter that knows of none, as lm-eval would wait for the others."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        from optout_train.score import score_run

        return score_run(config, folder, beside)
    alone = {k: v for k, v in os.environ.items() if k not in _DISTRIBUTED and not k.startswith("TORCHELASTIC")}
    done = subprocess.run(
        [sys.executable, "-m", "optout_train.score", str(folder), *([str(beside)] if beside else [])],
        env=alone,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.rstrip()


_DISTRIBUTED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


def main() -> None:
    """Run the command; bad input is one line and exit code 2, a failed run 1, Ctrl-C 130."""
    # Threads that spin while they wait for each other make a run beside busy processes many times slower. The OpenMP
    # library reads this when torch is imported; how many threads there are, and so the bytes, does not change.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        command.main(prog_name="optout-train", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(_say("interrupted; --resume goes on from the last checkpoint", 130))
    except click.ClickException as error:
        sys.exit(_say(f"Error: {error.format_message()}", 2))
    except Exception as error:
        name, home = type(error).__name__, type(error).__module__.split(".")[0]
        # By name where the class lies behind an import of torch or safetensors.
        disk = isinstance(error, OSError) or name == "SafetensorError"
        ours = isinstance(error, ValueError) and home in ("optout_train", "lm_eval_elude")
        if not (disk or ours or name in _FAILED):
            raise
        hint = "; a checkpoint that was written is whole: free the disk or check --output-dir, then --resume"
        line = f"Error: {' '.join(str(error).split())}{hint if disk else _FAILED.get(name, '')}"
        sys.exit(_say(line, 1 if name in _FAILED else 2))


# Failures of a run that was asked for rightly, and what may help.
_FAILED = {
    "TrainingError": "",
    "ScoreError": "",
    "OutOfMemoryError": "; give a smaller --micro-batch-size, --gradient-checkpointing or --lora",
}


def _say(line: str, code: int) -> int:
    click.echo(line, err=True)
    return code


if __name__ == "__main__":
    main()
