"""The command `moestream`: parses and prints. What takes MLX is imported by the commands."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import bench_cli, pack_cli, serve_cli, trace_cli
from . import cli_options as options
from .arguments import cache_path_argument
from .errors import BudgetTooSmall
from .policies import DEFAULT_POLICY
from .terminal import Terminated, note, print_json, raise_terminated, show_error

if TYPE_CHECKING:
    from .engine import SamplingArguments

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as shells have them."""


class _Commands(options.Group):
    """Turns errors of the commands into a line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as signalled:
            if sys.stderr.isatty():
                typer.echo(err=True)  # the shell's prompt gets a line of its own
            raise typer.Exit(_code(signalled)) from None
        except Exception as error:
            # Errors of usage and exits carry their code and are typer's to handle, as is a reader
            # of our output that has gone.
            if hasattr(error, "exit_code") or isinstance(error, BrokenPipeError | typer.Abort):
                raise
            show_error(error, debug=ctx.meta.get(options.DEBUG, False))
            meant = options.forgotten_unit(ctx.meta.get(options.MEMORY))
            if meant is not None and isinstance(error, BudgetTooSmall):
                note(f"did you mean --memory {meant}?")
            raise typer.Exit(1) from error


app = typer.Typer(
    name="moestream",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"moestream {version('moestream')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        options.flag("--version", "Print the version.", callback=_print_version, is_eager=True),
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Run Mixture-of-Experts models larger than memory, streaming their experts from the SSD."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(cls=options.Command)
def run(
    model: options.Model,
    prompt: Annotated[
        str,
        typer.Option(
            "-p", "--prompt", metavar="TEXT", help="The prompt; '-' reads standard input."
        ),
    ],
    chat: Annotated[
        bool, options.flag("--chat", "Send the prompt as a message of a chat.")
    ] = False,
    system: options.System = None,
    json_output: options.Json = False,
    no_stats: options.NoStats = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 0.0,
    min_p: options.MinP = 0.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    memory: options.Memory = None,
    slots: options.Slots = None,
    context: options.Context = None,
    dtype: options.Dtype = None,
    no_direct: options.NoDirect = False,
    lanes: options.Lanes = None,
    prefetch: options.Prefetch = "off",
    policy: options.Policy = DEFAULT_POLICY,
    trace: options.Trace = None,
    checksum: options.Checksum = False,
    read_timeout: options.ReadTimeout = None,
    prompt_cache: options.PromptFile = None,
    debug: options.Debug = False,
) -> None:
    """Generate text behind a prompt."""
    from .session import EngineOptions, messages, read_prompt, run_prompt, stats_line

    if system is not None and not chat:
        raise typer.BadParameter("--system is a message of a chat: give --chat too")
    sampling: SamplingArguments = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "min_p": min_p,
        "top_k": top_k,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "stop": stop or [],
        "ignore_eos": ignore_eos,
    }
    prompts = None if prompt_cache is None else cache_path_argument("--prompt-cache", prompt_cache)
    opened = EngineOptions(
        model,
        memory,
        slots,
        context,
        dtype,
        not no_direct,
        lanes,
        prefetch,
        trace,
        checksum,
        policy,
        read_timeout,
        prompt_cache=True if prompts is not None else None,
    )
    text = read_prompt(prompt)
    request = messages(text, system) if chat else text
    result, plan = run_prompt(opened, request, sampling, quiet=json_output, prompts=prompts)
    if json_output:
        print_json(
            {
                "model": model,
                "slots": plan.slots,
                "context": plan.context,
                "text": result.text,
                "tokens": result.tokens,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "cached_tokens": result.cached_tokens,
                "stats": {**asdict(result.stats), "hit_rate": result.stats.hit_rate},
            }
        )
    elif not no_stats:
        note(stats_line(result))


@app.command(cls=options.Command)
def chat(
    model: options.Model,
    system: options.System = None,
    no_stats: options.NoStats = False,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 0.0,
    min_p: options.MinP = 0.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    memory: options.Memory = None,
    slots: options.Slots = None,
    context: options.Context = None,
    dtype: options.Dtype = None,
    no_direct: options.NoDirect = False,
    lanes: options.Lanes = None,
    prefetch: options.Prefetch = "off",
    policy: options.Policy = DEFAULT_POLICY,
    trace: options.Trace = None,
    checksum: options.Checksum = False,
    read_timeout: options.ReadTimeout = None,
    prompt_cache: options.PromptFile = None,
    debug: options.Debug = False,
) -> None:
    """Talk with a model, line by line."""
    from .session import EngineOptions
    from .session import chat as talk

    sampling: SamplingArguments = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "min_p": min_p,
        "top_k": top_k,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "stop": stop or [],
        "ignore_eos": ignore_eos,
    }
    prompts = None if prompt_cache is None else cache_path_argument("--prompt-cache", prompt_cache)
    opened = EngineOptions(
        model,
        memory,
        slots,
        context,
        dtype,
        not no_direct,
        lanes,
        prefetch,
        trace,
        checksum,
        policy,
        read_timeout,
        max_running=1,
        prompt_cache=True,  # each turn repeats the conversation
    )
    talk(opened, sampling, system=system, stats=not no_stats, prompts=prompts)


@app.command(cls=options.Command)
def plan(
    model: options.Model,
    memory: options.Memory = None,
    slots: options.Slots = None,
    context: options.Context = None,
    prompt_cache: options.PromptCacheSize = None,
    bandwidth: options.Bandwidth = None,
    measure: Annotated[
        bool, options.flag("--measure", "Run the model a little first, for a better forecast.")
    ] = False,
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show how memory would be divided and how fast that would be, from a model's headers.

    The forecast goes by what earlier runs of the model and `moestream doctor` have measured on this
    machine, and says what it had to assume.
    """
    from .inspection import inspect_plan, measure_model

    try:
        if measure:
            measure_model(model, memory=memory, slots=slots, context=context)
        report = inspect_plan(
            model,
            memory=memory,
            slots=slots,
            context=context,
            bandwidth=bandwidth,
            prompt_cache=prompt_cache,
        )
    except BudgetTooSmall as error:
        if not json_output:
            raise
        print_json(error.to_json())
        raise typer.Exit(1) from error
    if json_output:
        print_json(report.to_json())
    else:
        from .cli_output import print_plan
        from .session import EngineOptions, note_changes

        given = EngineOptions(model, memory, slots, context)
        note_changes(given, report.plan, {}, report.longest_context)
        print_plan(report)


@app.command(cls=options.Command)
def doctor(
    path: Annotated[
        Path,
        typer.Argument(
            help="Directory, file or model on the drive to measure.", show_default=False
        ),
    ] = Path(),
    file_size: options.FileSize = None,
    read_sizes: options.ReadSizes = None,
    depths: options.Depths = None,
    seconds: options.Seconds = None,
    chaos: options.Chaos = False,
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure a drive and show what the machine has.

    A directory, the current one unless given, gets a temporary file of --size, which is gone
    afterwards. A file, or the largest *.safetensors of a model, is only read.

    With --chaos it runs a model instead, on a drive with faults, and looks whether each fault fails
    the request that it should and no other. Exit code 1 when one does not.
    """
    from .cli_output import binary_size, print_chaos, print_drive, print_machine
    from .inspection import DriveOptions, machine_facts, measure_drive, measured_path, run_chaos

    if chaos:
        trials = run_chaos(path)
        if json_output:
            print_json(trials.to_json())
        else:
            print_chaos(trials)
        if not trials.passed:
            raise typer.Exit(1)
        return
    given: dict[str, Any] = {
        "file_bytes": file_size,
        "sizes": read_sizes and tuple(read_sizes),
        "depths": depths and tuple(depths),
        "seconds_per_cell": seconds,
    }
    measured = DriveOptions(**{name: value for name, value in given.items() if value is not None})
    if measured.file_bytes < measured.least_bytes:
        raise typer.BadParameter(
            f"--size must be at least {binary_size(measured.least_bytes)}: "
            f"{max(measured.depths)} reads of {binary_size(min(measured.sizes))} at once"
        )
    target = measured_path(path, measured)
    facts = machine_facts()
    if not json_output:
        print_machine(facts)
    report = measure_drive(target, measured)
    if json_output:
        print_json({"machine": facts, "drive": report.to_json()})
    else:
        print_drive(report)


@app.command(cls=options.Command)
def demo(
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What to ask, instead of for a story.")
    ] = None,
    slots: options.DemoSlots = None,
    max_tokens: options.MaxTokens = 160,
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run the small model that comes with moestream, streamed and with everything resident."""
    from .cli_output import print_comparison
    from .demo import DEMO_PROMPT, compare
    from .session import show

    question = DEMO_PROMPT if prompt is None else prompt
    if json_output:
        quiet = compare(question, slots=slots, max_tokens=max_tokens, on_chunk=lambda chunk: None)
        print_json(quiet.to_json())
        return
    typer.echo(f"> {question}\n")
    comparison = compare(question, slots=slots, max_tokens=max_tokens, on_chunk=show)
    typer.echo("\n")
    if slots is not None and slots > (experts := comparison.streamed.experts):
        note(f"--slots {slots} is more than there are: layers have {experts} experts")
    print_comparison(comparison)
    if comparison.first_difference is None:
        typer.echo("\nBoth runs gave the same tokens.")
    else:
        typer.echo(f"\nThe runs differ from token {comparison.first_difference} on.")
    typer.echo("Next: moestream plan path/to/model --memory 8GB")
    typer.echo("      moestream run path/to/model --memory 8GB -p 'Once upon a time'")


app.command(cls=options.Command)(serve_cli.serve)
app.command(cls=options.Command)(pack_cli.pack)
app.add_typer(trace_cli.app, name="trace")
app.add_typer(bench_cli.app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Text that the terminal's encoding lacks is no reason to stop.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    # The tokenizer warns of prompts that are long by its own idea; the context is what counts.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        app()
    except KeyboardInterrupt as signalled:  # before the commands or behind them
        sys.exit(_code(signalled))


def _code(signalled: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(signalled, Terminated) else INTERRUPTED
