"""What a server tells: health, figures, its page, logs; who may ask; mounting it elsewhere."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from moestream import Engine
from moestream.runtime import server
from moestream.runtime.server import logs
from moestream.runtime.server.logs import JsonLines, log, logging_to
from moestream.runtime.server.metrics import Metrics
from moestream.runtime.server.settings import InvalidSetting, ServerSettings

from .serving import QUESTION, ScriptedEngine, calling, listening, tokenizer_with

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_with(tmp_path_factory.mktemp("pages"), demo, TEMPLATE)


def application(tokenizer: Any, **settings: Any) -> Starlette:
    return server.app(ScriptedEngine(tokenizer, "fine, thank you").as_engine(), **settings)


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, labels) -> value of each sample of a page of metrics."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- figures


@pytest.mark.one_loop
async def test_figures_of_a_real_engine(demo: Path) -> None:
    async with await Engine.open(demo, slots=16) as engine:
        async with calling(server.app(engine)) as client:
            body = {"messages": QUESTION, "max_tokens": 5}
            assert (await client.post(CHAT, json=body)).status_code == 200
            assert (await client.post(CHAT, json={})).status_code == 400
            # The engine adds a request up when its stream has ended; behind this one it has.
            await engine.generate("Hello", max_tokens=1)
            found = samples((await client.get("/metrics")).text)
            stats = (await client.get("/stats")).json()
        statistics = engine.statistics()
        assert found["moestream_engine_tokens_total", ""] == statistics.tokens == 6
        assert found["moestream_engine_hits_total", ""] == statistics.hits
        assert found["moestream_engine_bytes_read_total", ""] == statistics.bytes_read > 0
        assert found["moestream_server_tokens_total", ""] == 5
        assert found["moestream_http_requests_total", "chat,200"] == 1
        assert found["moestream_http_requests_total", "chat,400"] == 1
        assert found["moestream_http_request_seconds_count", "chat"] == 2
        assert found["moestream_time_to_first_token_seconds_count", ""] == 1
        assert found["moestream_up", ""] == 1
        assert stats["model"] == "demo-moe-4bit" and stats["generated_tokens"] == 5
        assert stats["engine"]["hits"] == statistics.hits
        assert stats["engine"]["hit_rate"] == statistics.hit_rate
        assert stats["engine"]["prefetch"]["drive_busy_seconds"] > 0


async def test_health(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "fine")
    app = server.app(engine.as_engine())
    async with calling(app) as client:
        for change, status, health in (
            ({}, 200, "ready"),
            ({"trace_error": "the disk is full"}, 200, "degraded"),
            ({"alive": False}, 503, "dead"),
        ):
            for name, value in change.items():
                setattr(engine, name, value)
            answer = await client.get("/health")
            assert (answer.status_code, answer.json()) == (status, {"status": health})


async def test_paths_and_methods_that_are_not_there(tokenizer: Any) -> None:
    async with calling(application(tokenizer)) as client:
        answer = await client.get("/v1/nothing")
        assert answer.status_code == 404 and "GET /v1/nothing" in answer.json()["error"]["message"]
        answer = await client.get(CHAT)
        assert answer.status_code == 405 and "POST" in answer.headers["allow"]


async def test_request_ids(tokenizer: Any) -> None:
    async with calling(application(tokenizer)) as client:
        mine = await client.get("/health", headers={"x-request-id": "job-7:a.b_c"})
        assert mine.headers["x-request-id"] == "job-7:a.b_c"
        ids = {
            (await client.get("/health", headers={"x-request-id": bad})).headers["x-request-id"]
            for bad in ("", "a b", "x" * 129, '"><script>')
        }
        assert len(ids) == 4 and all(re.fullmatch("[0-9a-f]{32}", key) for key in ids)
        for path in (CHAT, "/v1/nothing", "/v1/messages"):
            assert (await client.post(path, json={})).headers["x-request-id"]


# -- logs


async def test_logs_have_figures_and_no_words(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "moestream.server")
    engine = ScriptedEngine(tokenizer, "a private answer", "a private answer")
    async with calling(server.app(engine.as_engine(), api_key="hidden")) as client:
        key = {"authorization": "Bearer hidden", "x-request-id": "one"}
        body = {"prompt": "a private question", "max_tokens": 20}
        assert (await client.post(TEXT, json=body, headers=key)).status_code == 200
        wrong = {"messages": [{"role": "a private role", "content": ""}]}
        assert (await client.post(CHAT, json=wrong, headers=key)).status_code == 400
        engine.fail = (0, RuntimeError("broken"))
        assert (await client.post(TEXT, json=body, headers=key)).status_code == 500
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert [line["event"] for line in lines] == [
        "request",
        "request",
        "generation failed",
        "request",
    ]
    first = lines[0]
    assert (first["request_id"], first["endpoint"], first["status"]) == ("one", "completions", 200)
    assert first["prompt_tokens"] > 0 and first["tokens"] > 0 and first["seconds"] >= 0
    written = json.dumps(lines)
    assert "private" not in written and "hidden" not in written
    assert all("\n" not in JsonLines().format(record) for record in caplog.records)


# -- pages of others


async def test_pages_of_other_origins_may_not_call(tokenizer: Any) -> None:
    async with calling(application(tokenizer)) as client:
        body = {"prompt": "Hi"}
        for origin, status in (
            ("http://127.0.0.1", 200),  # its own page: the same as the host
            ("https://evil.example", 403),
            ("null", 403),
        ):
            answer = await client.post(TEXT, json=body, headers={"origin": origin})
            assert answer.status_code == status
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_name_that_was_made_to_lead_here(trusted: bool, tokenizer: Any) -> None:
    app = application(tokenizer, trust_host=trusted)
    async with calling(app) as client:
        for host, local in (
            ("evil.example:8000", False),
            ("127.0.0.1.evil.example", False),
            ("localhost.evil.example", False),
            ("localhost:8000", True),
            ("127.0.0.1:8000", True),
            ("[::1]:8000", True),
        ):
            headers = {"host": host, "origin": f"http://{host}"}
            answer = await client.post(TEXT, json={"prompt": "Hi"}, headers=headers)
            assert answer.status_code == (200 if trusted or local else 403), host
        # What is no web page is not asked.
        answer = await client.post(TEXT, json={"prompt": "Hi"}, headers={"host": "any.example"})
        assert answer.status_code == 200


async def test_cors(tokenizer: Any) -> None:
    page = "https://page.example"
    app = application(tokenizer, cors=(page,), api_key="secret")
    async with calling(app) as client:
        asked = {"origin": page, "access-control-request-method": "POST"}
        before = await client.options(
            TEXT, headers={**asked, "access-control-request-headers": "authorization"}
        )
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == page
        assert "authorization" in before.headers["access-control-allow-headers"]
        answer = await client.post(TEXT, json={"prompt": "Hi"}, headers={"origin": page})
        assert answer.status_code == 401  # and the page may read why
        assert answer.headers["access-control-allow-origin"] == page
        other = await client.post(
            TEXT, json={}, headers={"origin": "https://evil.example", "x-api-key": "secret"}
        )
        assert other.status_code == 403
    async with calling(application(tokenizer, cors=("*",))) as client:
        answer = await client.get("/v1/models", headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


# -- the page


async def test_the_page_needs_nothing_from_elsewhere(tokenizer: Any) -> None:
    async with calling(application(tokenizer)) as client:
        answer = await client.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    page = answer.text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page) and "@import" not in page
    ids = set(re.findall(r'\bid="(\w+)"', page))
    assert set(re.findall(r'at\("(\w+)"\)', page)) <= ids
    assert set(re.findall(r'fetch\("([\w/]+)"', page)) == {"stats", "v1/chat/completions"}


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_script_of_the_page_parses(tmp_path: Path) -> None:
    page = Path(server.__file__).with_name("page.html").read_text(encoding="utf-8")
    (script,) = re.findall("<script>(.*)</script>", page, re.DOTALL)
    (tmp_path / "page.js").write_text(script)
    done = subprocess.run(
        ["node", "--check", tmp_path / "page.js"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium")
async def test_the_page_in_a_browser(tokenizer: Any, tmp_path: Path) -> None:
    """Its figures are filled in; the policy of the page lets its script run and fetch."""
    app = application(tokenizer, name="the name of the model")
    async with listening(app) as url:
        browser = await asyncio.create_subprocess_exec(
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000", url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        shown = (await browser.communicate())[0].decode()
    assert '<h1 id="model">the name of the model</h1>' in shown
    assert re.search('id="health"[^>]*>ready<', shown)
    assert '<dd id="rate">0.0</dd>' in shown


@pytest.mark.one_loop
async def test_the_figures_that_the_page_shows_are_there(tokenizer: Any) -> None:
    page = Path(server.__file__).with_name("page.html").read_text(encoding="utf-8")
    async with calling(application(tokenizer)) as client:
        stats = (await client.get("/stats")).json()
    paths = set(re.findall(r"\b(?:s|now)\.((?:\w+)(?:\.\w+)*)", page))
    assert len(paths) >= 9
    for path in paths:
        value = stats
        for name in path.split("."):
            value = value[name]


# -- elsewhere


async def test_mounted_in_another_app(tokenizer: Any) -> None:
    outer = Starlette(routes=[Mount("/llm", application(tokenizer, api_key="secret"))])
    async with calling(outer) as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/")).text.startswith("<!doctype html>")
        assert (await client.post("/llm/v1/messages", json={})).json()["type"] == "error"
        key = {"x-api-key": "secret"}
        answer = await client.post(f"/llm{TEXT}", json={"prompt": "Hi"}, headers=key)
        assert answer.json()["choices"][0]["text"] == "fine, thank you"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"api_key": ""}, "API key is empty"),
        ({"api_key": "clé"}, "printable ASCII"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"max_body": 0}, "max_body=0"),
        ({"cors": ("example.org",)}, "is no origin"),
        ({"cors": ("https://example.org/",)}, "is no origin"),
        ({"keep_alive": 0}, "keep_alive"),
        ({"sampling": {"temperature": -1.0}}, "temperature=-1.0"),
    ],
)
def test_settings_that_make_no_sense(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ServerSettings(**setting)


def test_unknown_settings(tokenizer: Any) -> None:
    with pytest.raises(TypeError, match="colour"):
        application(tokenizer, colour="red")
    assert issubclass(InvalidSetting, ValueError)


# -- names, and logs that nobody reads


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/models/owl-4bit/", "owl-4bit"),
        ("/cache/hub/models--org--owl-4bit/snapshots/0a1b2c", "org/owl-4bit"),
        ("/", "moestream"),
        (None, "moestream"),
    ],
)
async def test_name_of_the_model(place: str | None, name: str) -> None:
    class Tokenizer:
        name_or_path = place

    app = server.app(ScriptedEngine(Tokenizer(), "never").as_engine())
    async with calling(app) as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [name]
        one = await client.get(f"/v1/models/{name}")
        assert one.json() == models[0]


def test_logs_are_lines_of_json_of_another_thread() -> None:
    stream = io.StringIO()
    threads: set[int] = set()

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            threads.add(threading.get_ident())
            return stream.write(text)

    with logging_to(Watched()):
        log("tested", status=5, nothing=None)
        log("not shown", level=logging.DEBUG)
        logging.getLogger("uvicorn.error").info("not shown either")
        logging.getLogger("uvicorn.error").warning("shown\nin one line")
    log("too late")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["tested", "shown\nin one line"]
    assert lines[0]["status"] == 5 and "nothing" not in lines[0]
    assert threads and threading.get_ident() not in threads


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_RECORDS", 5)
    entered, opened = threading.Event(), threading.Event()
    written: list[str] = []

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            entered.set()
            assert opened.wait(20)
            written.append(text)
            return len(text)

    with logging_to(Stuck()):
        log("first")
        assert entered.wait(20)
        for _ in range(100):  # would never end if one of them waited
            log("more")
        opened.set()
    assert "".join(written).count("more") <= 5


# -- the caller's loop


async def test_nothing_blocks_the_loop(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every endpoint, with blocking calls on the loop made into errors."""
    app = application(tokenizer)
    async with calling(app) as client:
        await client.get("/health")  # imports of the client itself
        with blockbuster_ctx("moestream"):
            for path in ("/", "/health", "/metrics", "/stats", "/v1/models", "/nothing"):
                assert (await client.get(path)).status_code in (200, 404)
            for stream in (False, True):
                for path, prompt in (
                    (CHAT, {"messages": QUESTION}),
                    (TEXT, {"prompt": "Hi"}),
                    ("/v1/messages", {"messages": QUESTION, "max_tokens": 5}),
                ):
                    answer = await client.post(path, json={**prompt, "stream": stream})
                    assert answer.status_code == 200
            counted = await client.post("/v1/messages/count_tokens", json={"messages": QUESTION})
            assert counted.status_code == 200

            def blocks(metrics: Metrics) -> bytes:
                time.sleep(0)
                return b""

            monkeypatch.setattr(Metrics, "text", blocks)  # the trap itself works
            assert (await client.get("/metrics")).status_code == 500
