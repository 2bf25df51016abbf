"""The programs in scripts/examples run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from scripts.examples import agents
from scripts.examples.embed_fastapi import make_app

from moestream import Engine

from .serving import ANSWER, QUESTION

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.one_loop
async def test_embedded_in_fastapi(demo: Path) -> None:
    app = make_app(str(demo), slots=16)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"messages": QUESTION}
            answer = await client.post("/llm/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == ANSWER
            own = await client.get("/describe/owls")
            assert own.status_code == 200 and len(own.json()["text"]) > 20
        engine: Engine = app.state.engine
        assert engine.statistics().requests_finished == 2
    assert not engine.alive


@pytest.mark.one_loop
async def test_agents_share_an_engine(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with await Engine.open(demo, slots=16) as engine:
        answer = await agents.run(engine, "a trip to the sea")
        assert answer
        statistics = engine.statistics()
        # The writers stop by themselves or at their end; nobody's request is left.
        assert statistics.requests_finished + statistics.requests_cancelled == 5
        assert statistics.requests_failed == statistics.requests_waiting == 0
        engine.check_integrity(idle=True)
    printed = capsys.readouterr().out
    assert all(f"- {voice} is done" in printed for voice in agents.VOICES)


def test_notebook_opens_a_trace(demo: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "examples" / "trace_notebook.py"
    trace = tmp_path / "run.json"
    done = subprocess.run(
        [sys.executable, script, str(demo), str(trace)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert trace.stat().st_size > 10_000
    assert "layer 0:" in done.stdout and "experts were resident" in done.stdout
    assert "belady" in done.stdout.lower()
    assert script.read_text(encoding="utf-8").count("# %%") >= 4
