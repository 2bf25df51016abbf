"""The command line: what is printed where, exit codes, errors, Ctrl-C."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import moestream
from moestream.io import drive
from moestream.runtime import cli_output, demo, inspection, plan, session, sizes
from moestream.runtime.cli import app, main
from moestream.runtime.terminal import interrupts_held

PROMPT = "Once upon a time"
COMMAND = [sys.executable, "-m", "moestream"]
ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
DRIVE = ["--read-size", "4KiB", "--read-size", "16KiB", "--depth", "1", "--depth", "2"]


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with demo.demo_model() as path:
        yield str(path)


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without experts."""
    from mlx_lm import utils
    from mlx_lm.models import llama

    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
    }
    directory = tmp_path_factory.mktemp("dense")
    utils.save_model(directory, llama.Model(llama.ModelArgs.from_dict(config)))
    utils.save_config(dict(config), directory / "config.json")
    return str(directory)


def call(*arguments: str, code: int = 0, stdin: str | None = None) -> tuple[str, str]:
    """Standard output and standard error of a command in this process."""
    result = CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "120"})
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result.stdout, result.stderr


def call_json(*arguments: str) -> Any:
    output, _ = call(*arguments, "--json")
    return json.loads(output)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def error_line(*arguments: str, stdin: str | None = None) -> str:
    """The one line that a failing command prints."""
    output, errors = call(*arguments, code=1, stdin=stdin)
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    return line


# -- help and usage


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ([], ["--version", "--debug", "run", "chat", "plan", "doctor", "demo", "pack", "bench"]),
        (["run"], ["--prompt", "--stop", "--memory", "--prefetch", "--trace", "--json"]),
        (["chat"], ["--system", "--temperature", "--slots", "--no-stats"]),
        (["plan"], ["--memory", "--slots", "--context", "--json"]),
        (["doctor"], ["--size", "--depth", "--json"]),
        (["demo"], ["--prompt", "--slots", "--max-tokens", "--json"]),
        (["bench"], ["--suite", "--arms", "--record-mb", "--csv", "--json"]),
        (["bench", "plot"], ["--out", "--json"]),
    ],
    ids=lambda value: " ".join(value) if len(value) < 2 else "",
)
def test_help(command: list[str], options: list[str]) -> None:
    text = plain(call(*command, "--help")[0])
    assert [option for option in options if option not in text] == []
    assert "<bool>" not in text


def test_no_arguments_print_help() -> None:
    assert plain(call()[0]).strip() == plain(call("--help")[0]).strip()


def test_version() -> None:
    assert call("--version")[0] == f"moestream {moestream.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "somewhere"],
        ["run", "somewhere", "-p", "x", "--nonsense"],
        ["run", "somewhere", "-p", "x", "--slots", "0"],
        ["run", "somewhere", "-p", "x", "--system", "without --chat"],
        ["nonsense"],
        ["doctor", "--size", "much"],
        ["doctor", "--read-size", "5"],
        ["doctor", "--size", "1kB"],
        ["doctor", "--seconds", "0"],
        ["run", "somewhere", "-p", "x", "--dtype", "int4"],
        ["run", "somewhere", "-p", "x", "--prefetch", "maybe"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    output, errors = call(*arguments, code=2)
    assert "Usage: moestream" in plain(errors)
    assert "Traceback" not in output + errors


def test_command_line_imports_no_mlx() -> None:
    code = "import sys, moestream.runtime.cli; print(sorted({'mlx', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- run


def generated(model: str, prompt: Any, **sampling: Any) -> moestream.Generation:
    async def generate() -> moestream.Generation:
        async with await moestream.Engine.open(model, slots=16, prefetch="off") as engine:
            return await engine.generate(prompt, **sampling)

    return asyncio.run(generate())


def test_reading_ahead_in_prompts_alone(model: str) -> None:
    expected = generated(model, PROMPT * 6, max_tokens=3)
    done = subprocess.run(
        [
            *(*COMMAND, "run", model, "-p", PROMPT * 6, "--max-tokens", "3", "--slots", "16"),
            *("--prefetch", "prompts", "--json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    value = json.loads(done.stdout)
    assert tuple(value["tokens"]) == expected.tokens
    assert value["stats"]["bytes_read"] > 0


def test_run_json_is_what_the_engine_gives(model: str) -> None:
    expected = generated(model, PROMPT, max_tokens=12)
    done = subprocess.run(
        [
            *(*COMMAND, "run", model, "-p", PROMPT, "--max-tokens", "12", "--slots", "16"),
            *("--prefetch", "off", "--json"),  # what is read ahead depends on the time
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    value = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert value.keys() == {
        *("model", "slots", "context"),
        *("text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "stats"),
    }
    assert (value["model"], value["slots"], value["context"]) == (model, 12 * [16], 2048)
    assert tuple(value["tokens"]) == expected.tokens
    assert value["text"] == expected.text
    assert value["finish_reason"] == expected.finish_reason == "length"
    assert value["prompt_tokens"] == expected.prompt_tokens
    stats = value["stats"]
    assert (stats["hits"], stats["misses"]) == (expected.stats.hits, expected.stats.misses)
    assert stats["hit_rate"] == expected.stats.hit_rate
    assert stats["time_to_first_token"] > 0


def test_run_prints_text_and_figures_apart(model: str) -> None:
    arguments = ["run", model, "-p", PROMPT, "--max-tokens", "5", "--slots", "8"]
    output, errors = call(*arguments)
    expected = call_json(*arguments)
    assert output == expected["text"] + "\n"
    (line,) = errors.splitlines()
    assert re.fullmatch(
        r"prompt \d tokens in \d.\d\d s; answer 5 at \d+\.\d/s; "
        r"hits \d+\.\d %; read \d.* [kM]B; stalled \d+%",
        line,
    )
    assert call(*arguments, "--no-stats") == (output, "")


def test_an_error_behind_text_has_a_line_of_its_own(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = moestream.Engine.stream

    async def breaks(engine: moestream.Engine, *args: Any, **kwargs: Any) -> Any:
        async with aclosing(original(engine, *args, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk
                raise moestream.ReadFailed(
                    layer=3, expert=7, component="w", path=Path("f"), offset=8, problem="broken"
                )

    monkeypatch.setattr(moestream.Engine, "stream", breaks)
    output, errors = call("run", model, "-p", "Once upon a time", "--slots", "8", code=1)
    assert output == ",\n"
    assert errors.startswith("error: cannot read expert 7 of layer 3")


def test_run_reads_the_prompt_from_standard_input(model: str) -> None:
    arguments = ["--max-tokens", "5", "--slots", "64", "--json"]
    given = call_json("run", model, "-p", PROMPT, *arguments)
    for end in ("", "\n"):
        piped = json.loads(call("run", model, "-p", "-", *arguments, stdin=PROMPT + end)[0])
        assert piped["tokens"] == given["tokens"]
        assert piped["prompt_tokens"] == given["prompt_tokens"]


def test_figures_stay_in_a_line() -> None:
    stats = moestream.GenerationStats(
        *(0.0, 1234.5, 123.4, 0, 0, 999_000_000_000, 1334.7, 0.0, 0.0, 0, 0),
    )
    result = moestream.Generation("", (1,) * 12_345, "stop", 123_456, stats)
    assert session.stats_line(result).endswith("; all experts resident")
    busy = dataclasses.replace(result, stats=dataclasses.replace(stats, hits=1))
    line = session.stats_line(busy)
    assert line.endswith("; hits 100.0 %; read 999 GB; stalled 100%") and len(line) < 100


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--slots", "99"], [r"--slots 99 is more than there are: layers have 64 experts"]),
        (["--slots", "8", "--memory", "8GB"], [r"--memory 8GB is ignored: --slots says .*"]),
        (["--slots", "8", "--memory", "all"], [r"--slots 8 is ignored: --memory all .*"]),
        (["--memory", "900TB"], [r"--memory 900TB is more than this machine has \(.* GB\)"]),
        (["--context", "2049"], [r"--context 2049 is beyond the 2048 tokens .*"]),
        (["--memory", "2GB", "--context", "2048"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_was_ignored_is_said(arguments: list[str], lines: list[str], model: str) -> None:
    run = ("run", model, "-p", PROMPT, "--max-tokens", "1", "--no-stats")
    for command in (run, ("plan", model)):
        notes = call(*command, *arguments)[1].splitlines()
        assert len(notes) == len(lines), notes
        assert all(re.fullmatch(*pair) for pair in zip(lines, notes, strict=True)), notes
        assert call(*command, *arguments, "--json")[1] == ""


def test_more_tokens_than_the_context_are_cut(model: str) -> None:
    arguments = ("run", model, "-p", PROMPT, "--slots", "8", "--context", "12", "--no-stats")
    _, errors = call(*arguments, "--max-tokens", "13", "--ignore-eos")
    assert errors == "--max-tokens 13 is cut: prompt and answer get 12 tokens\n"


def test_long_prompts_bring_no_warning_of_the_tokenizer(model: str) -> None:
    prompt = "word " * 3000
    done = subprocess.run(
        [*COMMAND, "run", model, "-p", prompt], capture_output=True, text=True, env=ENVIRONMENT
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the prompt has ")


def test_run_chat_wraps_the_prompt(model: str) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is a friend?"},
    ]
    expected = generated(model, messages, max_tokens=6)
    value = call_json(
        *("run", model, "-p", "What is a friend?", "--chat", "--system", "Be short."),
        *("--max-tokens", "6", "--slots", "16"),
    )
    assert tuple(value["tokens"]) == expected.tokens
    assert value["prompt_tokens"] == expected.prompt_tokens


def test_run_passes_every_option_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Opened(Exception):
        pass

    async def stub(_: Any, /, model: str, **arguments: Any) -> None:
        seen.update(arguments, model=model)
        raise Opened

    def sampling(arguments: dict[str, Any]) -> None:
        seen.update(arguments)

    monkeypatch.setattr("moestream.runtime.engine.Engine.open", classmethod(stub))
    monkeypatch.setattr("moestream.runtime.sampling.make_sampling", sampling)
    call(
        *("run", "m", "-p", "x", "--max-tokens", "1", "--temperature", "0.5", "--top-p", "0.9"),
        *("--min-p", "0.1", "--top-k", "7", "--seed", "3", "--repetition-penalty", "1.1"),
        *("--stop", "a", "--stop", "b", "--ignore-eos", "--memory", "8GB", "--slots", "4"),
        *("--context", "99", "--dtype", "float32", "--no-direct", "--lanes", "2"),
        *("--prefetch", "off", "--trace", "t", "--checksum", "--policy", "lru"),
        *("--read-timeout", "2.5"),
        code=1,
    )
    assert seen == {
        "model": "m",
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.1,
        "top_k": 7,
        "seed": 3,
        "repetition_penalty": 1.1,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "memory": "8GB",
        "slots": 4,
        "context": 99,
        "dtype": "float32",
        "direct": False,
        "lanes": 2,
        "prefetch": "off",
        "trace": "t",
        "checksum": True,
        "policy": "lru",
        "read_timeout": 2.5,
        "progress": None,
    }


# -- errors


def test_missing_directory(tmp_path: Path) -> None:
    line = error_line("run", str(tmp_path / "nothing"), "-p", "x")
    assert "nothing does not exist" in line


@pytest.mark.parametrize("command", [["plan"], ["run", "-p", "x"]], ids=["plan", "run"])
def test_model_without_experts(command: list[str], dense_model: str) -> None:
    assert "is not a Mixture-of-Experts model" in error_line(*command, dense_model)


@pytest.mark.parametrize("command", [["plan"], ["run", "-p", "x"]], ids=["plan", "run"])
def test_budget_too_small_says_what_would_do(command: list[str], model: str) -> None:
    line = error_line(*command, model, "--memory", "1MB")
    assert re.search(r"needs at least \d+(\.\d\d)?[MG]B", line)


@pytest.mark.parametrize("command", [["plan"], ["run", "-p", "x"]], ids=["plan", "run"])
def test_forgotten_unit(command: list[str], model: str) -> None:
    _, errors = call(*command, model, "--memory", "8", code=1)
    first, second = errors.splitlines()
    assert first.startswith("error: memory=8 bytes is too small")
    assert second == "did you mean --memory 8GB?"
    assert "did you mean" not in call(*command, model, "--memory", "8kB", code=1)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0 must be from 0 to 100"),
        (["--temperature", "nan"], "must be a finite number"),
        (["--top-p", "2"], "top_p=2.0"),
        (["--max-tokens", "0"], "max_tokens=0 must be at least 1"),
        (["--memory", "much"], "memory='much' is not a size"),
        (["-p", ""], "the prompt is empty"),
        (["--top-k", "100000"], "top_k=100000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values(arguments: list[str], message: str, model: str) -> None:
    output, errors = call("run", model, "-p", "x", *arguments, code=1)
    assert message in errors
    assert errors.count("\n") == 1 and not output.strip()


def test_values_are_checked_before_the_model_is_opened(tmp_path: Path) -> None:
    line = error_line("run", str(tmp_path / "nothing"), "-p", "x", "--temperature", "-1")
    assert "temperature" in line


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback(before: bool, tmp_path: Path) -> None:
    arguments = ["plan", str(tmp_path / "nothing")]
    _, errors = call(*(["--debug", *arguments] if before else [*arguments, "--debug"]), code=1)
    assert errors.startswith("Traceback (most recent call last):\n")
    last = errors.splitlines()[-1]
    assert last.startswith("moestream.") and "does not exist" in last
    assert errors.count("does not exist;") == 1  # the source line has the start of it


def test_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(inspection, "inspect_plan", fails)
    _, errors = call("plan", "m", code=1)
    first, second = errors.splitlines()
    assert first == "error: KeyError: 'surprise'"
    assert "--debug" in second


def test_ctrl_c_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspection, "inspect_plan", interrupted)
    assert call("plan", "m", code=130) == ("", "")


def test_interrupts_are_held_while_importing() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
    )


def test_ctrl_c_while_generating(model: str) -> None:
    with start("run", model, "-p", PROMPT, "--ignore-eos", "--max-tokens", "1900") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == ""


def test_reader_that_has_gone(model: str) -> None:
    with start("run", model, "-p", PROMPT, "--ignore-eos", "--max-tokens", "1900") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=20) == 1
        assert process.stderr.read() == ""


# -- chat


def test_chat_keeps_a_history_until_reset(model: str) -> None:
    one, two = "What is a friend?", "Why is the sky blue?"
    first = generated(model, [{"role": "user", "content": one}], max_tokens=8)
    history = [
        {"role": "user", "content": one},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": two},
    ]
    second = generated(model, history, max_tokens=8)
    fresh = generated(model, history[-1:], max_tokens=8)
    output, errors = call(
        *("chat", model, "--slots", "16", "--max-tokens", "8"),
        stdin=f"{one}\n\n{two}\n/reset\n/nonsense\n{two}",
    )
    assert output.splitlines() == [first.text, second.text, fresh.text]
    assert [int(count) for count in re.findall(r"^prompt (\d+) tokens", errors, re.M)] == [
        first.prompt_tokens,
        second.prompt_tokens,
        fresh.prompt_tokens,
    ]
    assert "a new conversation" in errors
    assert "there is no command /nonsense" in errors


def test_chat_quits(model: str) -> None:
    output, errors = call("chat", model, "--slots", "8", "--no-stats", stdin="/quit\nHello\n")
    assert output == ""
    assert len(errors.splitlines()) == 1  # the greeting


def test_chat_says_when_the_context_is_full(model: str) -> None:
    output, errors = call(
        *("chat", model, "--slots", "8", "--context", "40", "--ignore-eos"),
        stdin="Hello\nAnd now?\n/reset\nHello\n/quit\n",
    )
    assert output == 2 * output[: len(output) // 2]
    assert "the context is full" in errors
    assert re.search(r"the conversation has \d+ tokens, and the context holds 40: /reset", errors)


def test_chat_ends_when_a_first_message_cannot_fit(model: str) -> None:
    arguments = ("chat", model, "--slots", "8", "--context", "5")
    _, errors = call(*arguments, stdin="Hello\nHello\n", code=1)
    assert re.search(r"error: the prompt has \d+ tokens but the context holds 5", errors)


def test_chat_reports_a_read_error_and_goes_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = moestream.Engine.stream
    calls = []

    def fails_once(engine: moestream.Engine, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise moestream.ReadFailed(
                layer=3, expert=7, component="w", path=Path("f"), offset=8, problem="broken"
            )
        return original(engine, *args, **kwargs)

    monkeypatch.setattr(moestream.Engine, "stream", fails_once)
    output, errors = call(
        *("chat", model, "--slots", "8", "--max-tokens", "3"), stdin="Hello\nHello\n"
    )
    assert "error: cannot read expert 7 of layer 3" in errors
    assert output.strip()
    assert calls[0] == calls[1]  # the failed turn has left no trace in the history


def test_ctrl_c_stops_only_the_answer(model: str) -> None:
    with start("chat", model, "--ignore-eos", "--max-tokens", "1900", "--memory", "all") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("Tell me a story.\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate("/reset\n/nonsense\n", timeout=20)
    assert process.returncode == 0
    assert errors.splitlines()[1:] == [
        "(stopped)",
        "a new conversation",
        "there is no command /nonsense; there are /reset and /quit",
    ]


# -- plan


def test_plan_adds_up(model: str) -> None:
    value = call_json("plan", model, "--memory", "400MB", "--context", "1024")
    assert sum(value["parts"].values()) == value["total"] == value["budget"] == 400_000_000
    assert value["parts"]["reserve"] >= 0
    assert value["minimum"] <= value["budget"]
    assert value["context"] == 1024
    assert not value["automatic"]
    layers = [number for group in value["layers"] for number in group["layers"]]
    assert layers == list(range(12))
    slots = sum(len(g["layers"]) * g["slots"] * g["slot_bytes"] for g in value["layers"])
    assert slots == value["parts"]["slots"]
    stored = sum(len(g["layers"]) * g["experts"] * g["record_bytes"] for g in value["layers"])
    assert stored == value["expert_bytes"]


def test_plan_of_what_was_called_enough(model: str) -> None:
    # The process has grown a little when it is measured again.
    few = call_json("plan", model, "--slots", "8")
    assert few["budget"] is None
    assert few["resident_share"] == 8 / 64
    enough = call_json("plan", model, "--memory", str(few["everything_resident"] + 20_000_000))
    assert enough["resident_share"] == 1.0
    least = call_json("plan", model, "--memory", str(few["minimum"] + 20_000_000))
    assert least["resident_share"] >= 6 / 64


def test_everything_resident_is_the_smallest_such_budget() -> None:
    layers = tuple(sizes.LayerSize(n, 16 + n, 4, 10**6 + n, 10**6) for n in range(5))
    cache = sizes.CacheSize(fixed=10**5, token=10**3)
    size = sizes.ModelSize(layers, 10**8, cache, 10**5, 10**2, 5000, 4096)
    for context in (1, 300, 4096):
        options = {"process_bytes": 10**8, "context": context}
        found = inspection.smallest_resident_plan(size, **options)
        assert found.budget is not None
        experts = tuple(layer.experts for layer in layers)
        assert plan.make_plan(size, budget=found.budget, **options).slots == experts
        assert plan.make_plan(size, budget=found.budget - 1, **options).slots != experts


def test_plan_for_people(model: str) -> None:
    output, errors = call("plan", model, "--slots", "16")
    assert errors == ""
    assert "layers 0-11: 64 experts, top 6, record 27.6 kB, slots 16 of 64" in output
    assert "25.0 % resident" in output
    assert "everything resident needs" in output
    assert "reserve" not in output  # nothing is kept back where there is no budget
    assert "reserve" in call("plan", model, "--memory", "400MB")[0]
    assert "(chosen from what is free)" in call("plan", model)[0]
    assert "KV cache at full context" in output
    assert "KV caches of 8 requests at full context" in call("plan", model, "--memory", "8GB")[0]


def test_plan_forecasts_and_says_what_it_assumes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTREAM_CACHE_DIR", str(tmp_path))

    def told(*more: str) -> tuple[dict[str, Any], str]:
        value = call_json("plan", model, "--slots", "16", *more)["forecast"]
        return value, " / ".join(value["assumptions"])

    value, said = told()
    assert value["bytes_per_token"] == pytest.approx((1 - value["hit_rate"]) * 72 * 27648)
    assert "a cautious curve" in said and "a rough estimate" in said
    assert "1 GB/s, a guess: measure the drive" in said
    _, said = told("--bandwidth", "2.5GB")
    assert "reading: 2.50 GB/s, as given" in said
    call("doctor", model, "--read-size", "4KiB", "--depth", "2", "--seconds", "0.001")
    _, said = told()
    assert "as `moestream doctor` measured buffered reads like these" in said
    value, said = told("--measure")
    assert "hit rates: from the routing of" in said
    assert "computing: measured in an earlier run" in said
    assert "GB/s, measured in an earlier run of this model" in said
    output, _ = call("plan", model, "--slots", "64")
    assert re.search(r"hit rate +100\.0 %", output)
    assert "assumed: computing: measured in an earlier run" in output
    assert "GB/s" not in output, "nothing is read"


def test_a_plan_that_does_not_fit_is_told_as_json_too(model: str) -> None:
    output, errors = call("plan", model, "--memory", "50MB", "--json", code=1)
    assert errors == ""
    value = json.loads(output)
    assert value["error"] == "budget too small"
    assert value["budget"] == 50_000_000 < value["minimum"] == sum(value["parts"].values())
    assert "too small" in value["message"]


# -- doctor


def test_doctor(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 18))
    arguments = ["doctor", str(file), *DRIVE, "--seconds", "0.01"]
    value = call_json(*arguments)
    assert value["machine"]["cores"] >= 1
    assert value["machine"]["device"].startswith(("cpu", "gpu"))
    assert value["machine"]["moestream"] == moestream.__version__
    cells = {(cell["mode"], cell["size"], cell["depth"]) for cell in value["drive"]["cells"]}
    assert {("buffered", size, depth) for size in (4096, 16384) for depth in (1, 2)} <= cells
    assert value["drive"]["choice"]["lanes"] in (1, 2)
    output, errors = call(*arguments)
    assert errors == ""
    assert "buffered, 16 KiB" in output
    assert "choice" in output and "why: " in output
    used = re.search(r"use it with: (--no-direct )?--lanes (\d)", output)
    assert used is not None and used[2] in ("1", "2")
    direct = "direct=False, " if used[1] else ""
    assert f"Engine.open(..., {direct}lanes={used[2]})" in output


def test_doctor_says_how_to_read_through_the_page_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = (drive.Cell("buffered", 4096, 4, 10**6, 1.0),)
    cli_output.print_drive(drive.DriveReport(tmp_path, 10**6, cells, "not supported", True))
    output = capsys.readouterr().out
    assert "use it with: --no-direct --lanes 4\n" in output
    assert "Engine.open(..., direct=False, lanes=4)" in output


def test_doctor_measures_in_a_directory(tmp_path: Path) -> None:
    value = call_json("doctor", str(tmp_path), "--size", "1MB", *DRIVE, "--seconds", "0.001")
    assert value["drive"]["file_bytes"] == 1_000_000
    assert list(tmp_path.iterdir()) == []


def test_doctor_takes_the_largest_weights_of_a_model(model: str, tmp_path: Path) -> None:
    options = inspection.DriveOptions()
    assert inspection.measured_path(Path(model), options).name == "model.safetensors"
    assert inspection.measured_path(tmp_path, options) == tmp_path
    small = inspection.DriveOptions(sizes=(4096,), depths=(1, 2))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.bin").write_bytes(bytes(20_000))
    (tmp_path / "a.safetensors").write_bytes(bytes(8191))
    assert inspection.measured_path(tmp_path, small) == tmp_path  # too small to be measured
    (tmp_path / "b.safetensors").write_bytes(bytes(8192))
    assert inspection.measured_path(tmp_path, small) == tmp_path / "b.safetensors"


@pytest.mark.parametrize("arguments", [["nothing"], ["--size", "512KiB"]], ids=" ".join)
def test_doctor_checks_before_it_prints(arguments: list[str]) -> None:
    output, errors = call("doctor", *arguments, code=2 if "--size" in arguments else 1)
    assert output == ""
    assert "--size must be at least 1 MiB" in errors or "nothing does not exist; " in errors


def test_doctor_helps_with_the_defaults_of_the_measurement() -> None:
    defaults = inspect.signature(drive.measure).parameters
    options = dataclasses.asdict(inspection.DriveOptions())
    assert options == {name: defaults[name].default for name in options}
    text = plain(call("doctor", "--help")[0])
    sizes = ", ".join(cli_output.binary_size(n).replace(" ", "") for n in options["sizes"])
    depths = ", ".join(map(str, options["depths"]))
    size = cli_output.binary_size(options["file_bytes"]).replace(" ", "")
    for default in (size, sizes, depths, str(options["seconds_per_cell"])):
        assert f"[default: ({default})]" in text


# -- demo


def test_demo_json() -> None:
    value = call_json("demo", "--max-tokens", "6")
    assert value["prompt"] == demo.DEMO_PROMPT
    assert len(value["tokens"]) == 6
    assert value["same_tokens"] is True and value["first_difference"] is None
    streamed, resident = value["streamed"], value["resident"]
    assert (streamed["slots"], resident["slots"]) == (16, 64)
    assert 0 < streamed["hit_rate"] < 1 == resident["hit_rate"]
    assert streamed["bytes_per_token"] > 0 == resident["bytes_per_token"]
    assert 0 < streamed["stall_share"] < 1
    assert 4 * streamed["expert_bytes"] == resident["expert_bytes"]


def test_demo_for_people() -> None:
    output, errors = call("demo", "--max-tokens", "3", "--slots", "64", "--prompt", "Hello!")
    assert errors == ""
    assert output.startswith("> Hello!\n")
    assert "everything resident" in output and "tokens/s" in output
    assert "first run, resident too" in output and "streamed" not in output
    assert "Both runs gave the same tokens." in output
    assert output.splitlines()[-1].strip().startswith("moestream run")


def test_demo_with_more_slots_than_experts() -> None:
    _, errors = call("demo", "--max-tokens", "1", "--slots", "65")
    assert errors == "--slots 65 is more than there are: layers have 64 experts\n"


def test_first_difference() -> None:
    assert demo._first_difference((1, 2), (1, 2)) is None
    assert demo._first_difference((1, 2), (1, 3)) == 1
    assert demo._first_difference((1, 2), (1,)) == 1


# -- output


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (27_648, "27.6 kB"),
        (2_654_208, "2.65 MB"),
        (999_600, "1.00 MB"),
        (17_270_287_974, "17.3 GB"),
        (232e9, "232 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_size(nbytes: float, text: str) -> None:
    assert cli_output.size(nbytes) == text


def test_ranges() -> None:
    assert cli_output.ranges([3]) == "3"
    assert cli_output.ranges([0, 1, 2, 5, 8, 7]) == "0-2, 5, 7-8"


def test_text_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.BytesIO()
    monkeypatch.setattr(
        sys, "argv", ["moestream", "plan", "nothing/caf\N{LATIN SMALL LETTER E WITH ACUTE}/x"]
    )
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(errors, "ascii"))
    with pytest.raises(SystemExit) as exit_:
        main()
    sys.stderr.flush()
    assert exit_.value.code == 1
    assert errors.getvalue().startswith(b"error: nothing/caf?/x does not exist")
