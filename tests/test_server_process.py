"""`moestream serve`: addresses, keys, signals, exit codes, errors."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moestream.runtime import serve_cli
from moestream.runtime.cli import app
from moestream.runtime.server.process import Address, AddressUnavailable, bind, url_of

SERVE = [sys.executable, "-m", "moestream", "serve"]
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Serving:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self._port = int(address.rpartition(":")[2])
        self._connections = ExitStack()

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        return self._connections.enter_context(closing(connection))

    def close(self) -> None:
        self._connections.close()

    def post(self, body: Any, **headers: str) -> http.client.HTTPResponse:
        connection = self.connect()
        headers = {"content-type": "application/json", **headers}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return self._connections.enter_context(closing(connection.getresponse()))

    def events(self, name: str) -> dict[str, Any]:
        """The next line of the log about an event."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{") and (event := json.loads(line))["event"] == name:
                assert isinstance(event, dict)
                return event
        raise AssertionError(f"no {name} in the log")


@contextmanager
def serving(demo: Path, *options: str, **environment: str) -> Iterator[Serving]:
    command = [*SERVE, str(demo), "--slots", "16", "--port", "0", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("Serving at http://"), process.communicate()
            with closing(Serving(process, line.split()[2])) as server:
                yield server
        finally:
            process.kill()


def text_of(response: http.client.HTTPResponse) -> str:
    return response.read().decode()


def test_running_requests_finish_at_sigterm(demo: Path) -> None:
    with serving(demo, MOESTREAM_API_KEY="secret") as server:
        assert server.post(LONG).status == 401
        key = {"authorization": "Bearer secret"}
        response = server.post({**LONG, "max_tokens": 60}, **key)
        first = response.readline()
        assert first.startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        rest = text_of(response)
        assert rest.count("data: {") == 60 - 1 and rest.endswith("data: [DONE]\n\n")
        assert server.process.wait(60) == 0
        assert server.process.stdout is not None and server.process.stdout.read() == ""
        log = [json.loads(line) for line in server.process.stderr or ()]
        assert [entry["event"] for entry in log] == ["ready", "request", "stopping", "request"]
        assert (log[2]["signal"], log[2]["active"]) == ("SIGTERM", 1)
        assert (log[3]["tokens"], log[3]["finish"]) == (60, "length")
        with pytest.raises(ConnectionRefusedError):
            server.connect().connect()


def test_what_takes_too_long_is_cut_off(demo: Path) -> None:
    with serving(demo, "--drain", "0") as server:
        response = server.post(LONG)
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = text_of(response)
        assert "the server has stopped" in rest and rest.endswith("data: [DONE]\n\n")
        assert server.process.wait(60) == 1
        assert server.events("cut off")["requests"] == 1


def test_a_second_signal_cuts_off(demo: Path) -> None:
    with serving(demo, "--drain", "600", "--host", "0.0.0.0") as server:
        assert server.process.stderr is not None
        assert "set a key in MOESTREAM_API_KEY" in server.process.stderr.readline()
        response = server.post(LONG)
        response.readline()
        server.process.send_signal(signal.SIGINT)
        assert server.events("stopping")["signal"] == "SIGINT"
        server.process.send_signal(signal.SIGINT)
        assert "the server has stopped" in text_of(response)
        assert server.process.wait(60) == 1


def test_ctrl_c_without_requests_ends_well(demo: Path) -> None:
    with serving(demo, "--name", "owl", "--max-tokens", "2", "--max-body", "1kB") as server:
        body = json.loads(text_of(server.post({"prompt": "Once", "model": "owl"})))
        assert body["usage"]["completion_tokens"] == 2
        assert server.post({"prompt": "x" * 2000}).status == 413
        page = {"host": "evil.example", "origin": "http://evil.example"}
        assert server.post({"prompt": "Once"}, **page).status == 403
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0


# -- errors, in this process


def error_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1, (result.stdout, result.stderr, result.exception)
    assert result.stdout == "" and result.stderr.count("\n") == 1
    return result.stderr


def test_port_in_use(demo: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        line = error_of(str(demo), "--port", str(port))
    assert f"port {port} of 127.0.0.1 is in use; give another with --port" in line


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "x" * 300])
def test_hosts_that_are_not_ours(host: str, demo: Path) -> None:
    assert "see --host" in error_of(str(demo), "--host", host)


def test_missing_packages(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_cli, "find_spec", lambda name: None if name == "uvicorn" else name)
    line = error_of(str(demo))
    assert "uvicorn is not installed" in line and 'pip install "moestream[server]"' in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cors", "example.org"], "is no origin"),
        (["--api-key", ""], "API key is empty"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--memory", "much"], "memory='much' is not a size"),
    ],
    ids=["cors", "key", "temperature", "memory"],
)
def test_bad_values(arguments: list[str], message: str, demo: Path) -> None:
    assert message in error_of(str(demo), "--port", "0", *arguments)


def test_missing_model(tmp_path: Path) -> None:
    assert "does not exist" in error_of(str(tmp_path / "nothing"), "--port", "0")


def test_addresses() -> None:
    local = {"127.0.0.1": True, "127.8.9.1": True, "::1": True, "localhost": True}
    for host, expected in {**local, "0.0.0.0": False, "::": False, "192.0.2.1": False}.items():
        assert Address(host, 1).is_local is expected
    with bind(Address("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        assert url_of(bound) == f"http://127.0.0.1:{port}"
        bound.listen(1)
        with pytest.raises(AddressUnavailable, match="in use"):
            bind(Address("127.0.0.1", port))
