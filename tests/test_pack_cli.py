"""`moestream pack` on the command line, and the other commands on a packed store."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moestream.io.manifest import parse_manifest
from moestream.runtime import pack_cli, packing
from moestream.runtime.pack_options import PackOptions
from moestream.runtime.packing import pack_model
from moestream.runtime.terminal import note, progress_bar

from .test_cli import DRIVE, PROMPT, call, call_json, error_line, plain


@pytest.fixture(scope="module")
def packed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("packed") / "store"
    pack_model(demo, store)
    return store


def test_help() -> None:
    text = plain(call("pack", "--help")[0])
    options = ["--bits", "--mode", "--group-size", "--layers", "--order", "--verify", "--json"]
    assert [option for option in options if option not in text] == []
    assert "pack" in plain(call("--help")[0])


def test_packing_prints_what_it_has_made(demo: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    output, errors = call("pack", str(demo), str(store), "--bits", "4", "--group-size", "32")
    first, then = output.splitlines()
    assert first.startswith("packed 768 experts of 12 layers: ")
    assert then == f"Next: moestream run {store} -p 'Once upon a time'"
    (warning,) = errors.splitlines()
    assert warning.startswith("the experts are quantized already (affine 4 bits in groups of 64)")


def test_options_reach_the_store(demo: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = ["--bits", "gate=3,up=3", "--layers", "0:down=8", "--layers", "1:keep"]
    document = call_json("pack", str(demo), str(store), *arguments, "--verify")
    assert document["store"] == str(store)
    assert (document["layers"], document["experts"], document["resumed"]) == (12, 768, 0)
    assert document["verified"]["records"] == 768
    assert document["verified"]["damages"] == []
    (warning,) = document["warnings"]
    assert "quantized already" in warning
    manifest = parse_manifest(store)
    assert manifest is not None
    bits = [
        [entry and entry["bits"] for entry in layer.quantization.values()]
        for layer in manifest.layers[:3]
    ]
    assert bits == [[3, 3, 8], [4, 4, 4], [3, 3, 4]]


def test_order_reaches_the_store(demo: Path, tmp_path: Path) -> None:
    trace, store = tmp_path / "routing.csv", tmp_path / "store"
    trace.write_text("step,layer,slot,expert\n0,3,0,7\n0,3,1,8\n")
    call("pack", str(demo), str(store), "--order", str(trace), "--order-by", "coactivation")
    manifest = parse_manifest(store)
    assert manifest is not None
    assert [layer.place is not None for layer in manifest.layers] == [n == 3 for n in range(12)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the directory of the store, DST, too"),
        (["--verify", "--bits", "4"], "--verify alone only reads"),
        (["--verify", "--force"], "--verify alone only reads"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, demo: Path) -> None:
    _, errors = call("pack", str(demo), *arguments, code=2)
    assert message in " ".join(plain(errors).replace("│", " ").split())


def test_errors_are_one_line(demo: Path, packed: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert "does not exist" in error_line("pack", str(tmp_path / "no"), store)
    assert "--force to replace it" in error_line("pack", str(demo), str(packed))
    assert "bits=7 must be one of" in error_line("pack", str(demo), store, "--bits", "7")
    assert "there is no moestream.json" in error_line("pack", "--verify", str(demo))
    assert "needs a packed store" in error_line("run", str(demo), "-p", "x", "--checksum")
    assert not Path(store).exists()


def test_verify(packed: Path, tmp_path: Path, demo: Path) -> None:
    output, errors = call("pack", "--verify", str(packed))
    assert output.startswith(f"{packed} is what was packed: 768 records, ")
    assert errors == ""
    store = tmp_path / "store"
    pack_model(demo, store)
    layer = store / "experts" / "layer-004.bin"
    data = bytearray(layer.read_bytes())
    for expert in range(25):
        data[28672 * expert] ^= 1
    layer.write_bytes(data)
    output, errors = call("pack", "--verify", str(store), code=1)
    lines = output.splitlines()
    assert lines[2] == (
        "layer 4, expert 2: experts/layer-004.bin at offset 57344: "
        "the bytes are not those that were packed"
    )
    assert (len(lines), lines[-1]) == (pack_cli._SHOWN + 1, "and 5 more")
    assert "is damaged in 25 places" in errors
    output, _ = call("pack", "--verify", str(store), "--json", code=1)
    damages = json.loads(output)["damages"]
    assert len(damages) == 25
    assert damages[1] == {
        "file": "experts/layer-004.bin",
        "offset": 28672,
        "problem": "the bytes are not those that were packed",
        "layer": 4,
        "expert": 1,
    }


def test_other_commands_take_a_store(demo: Path, packed: Path) -> None:
    arguments = ["-p", PROMPT, "--slots", "16", "--max-tokens", "8"]
    stored = call_json("run", str(packed), *arguments, "--checksum")
    in_place = call_json("run", str(demo), *arguments)
    assert stored["tokens"] == in_place["tokens"]
    layers = [call_json("plan", str(path), "--slots", "8")["layers"] for path in (packed, demo)]
    assert layers[0] == layers[1]
    report = call_json("doctor", str(packed), *DRIVE, "--seconds", "0.01")
    assert Path(report["drive"]["path"]).parent == packed


def test_doctor_measures_the_largest_file_of_a_store(
    packed: Path, demo: Path, tmp_path: Path
) -> None:
    pack_model(demo, tmp_path / "store", PackOptions(bits="8", group_size=32))
    large = ["--read-size", "128KiB", "--depth", "1", "--seconds", "0.01"]
    report = call_json("doctor", str(tmp_path / "store"), *large)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    largest = max(file.stat().st_size for file in files)
    assert Path(report["drive"]["path"]).stat().st_size == largest


def test_notes_come_before_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("packing", sizes=True, late=True) as report:
        assert report is not None
        note("a warning")
        assert "packing" not in screen.getvalue()
        report(2_000_000, 8_000_000)
    text = screen.getvalue()
    assert text.index("a warning") < text.index("packing")
    assert "2.0/8.0 MB" in plain(text)


def test_interrupted_packing_says_how_to_go_on(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "pack_layer", interrupt)
    output, errors = call("pack", str(demo), str(tmp_path / "store"), code=130)
    assert output == ""
    assert errors == "stopped: the same command again goes on where this one stopped\n"
    monkeypatch.undo()
    call("pack", str(demo), str(tmp_path / "store"))


def test_ctrl_c_in_a_process(demo: Path, tmp_path: Path) -> None:
    """A real interrupt, when the first layer is on the drive."""
    store = tmp_path / "store"
    code = """
import sys, threading
from moestream.runtime import packing
from moestream.runtime.cli import main
real = packing.pack_layer
def slow(*arguments):
    layer = real(*arguments)
    print("layer", flush=True)
    threading.Event().wait(30)
    return layer
packing.pack_layer = slow
main()
"""
    command = [sys.executable, "-c", code, "pack", str(demo), str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "layer\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped: the same command again" in errors
    assert not store.exists()
    call("pack", str(demo), str(store))
