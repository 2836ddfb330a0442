"""The `realvr` command. A command imports heavy libraries when it runs, so that `--help` answers at once."""

from pathlib import Path
from typing import Annotated

import typer

from launch.cli import run_command, run_job

app = typer.Typer(
    name="realvr",
    help="Train vision-language models that reason in latent tokens.\n\n"
    "A run is one YAML file: `realvr rl configs/rl/qwen2_5_vl_7b.yaml`. Any field can be changed on the command line "
    "(`optimizer.lr=1e-6`), `--dry-run` prints what would run, and the same command continues a stopped run. "
    "`launch fields realvr.rl` lists every field.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Fields to change: a.b=value …", metavar="[FIELD=VALUE]…")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and its sizes; run nothing.")]


@app.command()
def base(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train a tiny model from scratch; it stands in for a pretrained model in demos and tests."""
    run_job(config, overrides or [], dry_run=dry_run, expected_job="realvr.base")


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Stage 1: teach the latent span by the ROI's visual tokens (cross-entropy + 0.1 · MSE)."""
    run_job(config, overrides or [], dry_run=dry_run, expected_job="realvr.sft")


@app.command()
def rl(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    debug: Annotated[
        str, typer.Option(help="`rollout-only` keeps rollouts and trains nothing; `replay` trains on kept ones.")
    ] = "",
) -> None:
    """Stage 2: GRPO on text, evidence on latents."""
    chosen = [f"debug={debug}"] if debug else []
    run_job(config, [*(overrides or []), *chosen], dry_run=dry_run, expected_job="realvr.rl")


@app.command()
def evaluate(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Accuracy, counterfactual flips, latent distance, replacement and transplant of a checkpoint, with 95 % CI."""
    run_job(config, overrides or [], dry_run=dry_run, expected_job="realvr.evaluate")


@app.command()
def demo(
    data: Annotated[str, typer.Option(help="World of the demo: shapes or digits.")] = "shapes",
    folder: Annotated[
        Path | None, typer.Option(help="Where its runs and report.html go; runs/demo, or runs/demo-digits.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few steps of everything: proves the installation.")] = False,
) -> None:
    """The whole job on this machine: tiny base → stage 1 → GRPO and ReaLVR → evaluation → report.html."""

    def command() -> None:
        from realvr.demo import run_demo

        run_demo(data, folder or Path("runs/demo" if data == "shapes" else f"runs/demo-{data}"), smoke)

    run_command(command)


@app.command("init-tiny")
def init_tiny(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    family: Annotated[str, typer.Option(help="qwen2_5_vl or qwen3_vl.")] = "qwen2_5_vl",
    size: Annotated[str, typer.Option(help="`demo` (0.3 M parameters) or `test`.")] = "demo",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny random checkpoint that transformers and vLLM load."""

    def command() -> None:
        from realvr.families import get_family

        get_family(family).tiny(str(folder), size, seed)
        typer.echo(f"{folder}: a random {family} model; next: realvr base configs/demo/base.yaml model.path={folder}")

    run_command(command)


@app.command("add-tokens")
def add_latent_tokens(
    source: Annotated[str, typer.Argument(help="Checkpoint folder or hub id (Qwen/Qwen2.5-VL-7B-Instruct).")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Give a pretrained checkpoint the three latent tokens: the start of stage 1."""

    def command() -> None:
        from realvr.families.add_tokens import add_tokens

        ids = add_tokens(source, folder)
        typer.echo(f"{folder}: latent tokens have ids {ids}; next: realvr sft … model.path={folder}")

    run_command(command)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="Run folder (best or latest checkpoint) or a checkpoint folder.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Write a checkpoint of a run as a plain transformers model (LoRA merged) with a model card."""

    def command() -> None:
        from realvr.learner.export import export_checkpoint

        export_checkpoint(source, folder)
        typer.echo(f"{folder}: loads with transformers, vLLM and realvr. Next: realvr evaluate … model.path={folder}")

    run_command(command)


def main() -> None:
    """Console entry point."""
    app()


if __name__ == "__main__":
    main()
