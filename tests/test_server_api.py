"""The server as the clients of OpenAI and Anthropic see it, on the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from moestream import Engine
from moestream.runtime import server

from .serving import ANSWER, QUESTION, calling, listening

MODEL = "demo-moe-4bit"
PROMPT = "Once upon a time"


@pytest.fixture(autouse=True)
def no_stray_threads() -> Iterator[None]:
    """The engine of this module outlives its tests."""
    yield


@pytest.fixture(scope="module")
def engine(demo: Path) -> Iterator[Engine]:
    engine = asyncio.run(Engine.open(demo, memory="all"))
    yield engine
    engine.check_integrity(idle=True)
    asyncio.run(engine.aclose())


@asynccontextmanager
async def openai_client(engine: Engine, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(server.app(engine, **settings)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_client(
    engine: Engine, **settings: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        listening(server.app(engine, **settings)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client,
    ):
        yield client


# -- OpenAI


@pytest.mark.one_loop
async def test_openai_client_on_everything_plain(engine: Engine) -> None:
    """One server for what would each be a test of a line: starting one takes a while."""
    messages: Any = QUESTION
    async with openai_client(engine) as client:
        models = [model.id async for model in client.models.list()]
        assert models == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL

        chat = await client.chat.completions.create(model=MODEL, messages=messages)
        assert chat.object == "chat.completion"
        (choice,) = chat.choices
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
        assert choice.message.role == "assistant" and choice.logprobs is None
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (17, 12)
        assert chat.usage.total_tokens == 29

        parts: Any = [
            {"role": "user", "content": [{"type": "text", "text": "Hello! How are you?"}]}
        ]
        again = await client.chat.completions.create(model=MODEL, messages=parts)
        assert again.choices[0].message.content == ANSWER

        short = await client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=3
        )
        assert short.choices[0].finish_reason == "length"
        assert short.choices[0].message.content == "I am fine"

        stopped = await client.chat.completions.create(
            model=MODEL, messages=messages, stop=[" you", "never"]
        )
        assert stopped.choices[0].message.content == "I am fine, thank"
        assert stopped.choices[0].finish_reason == "stop"

        text = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
        assert text.object == "text_completion"
        assert text.choices[0].text == (await engine.generate(PROMPT, max_tokens=4)).text
        assert text.choices[0].finish_reason == "length"


async def test_openai_streams(engine: Engine) -> None:
    messages: Any = QUESTION
    async with openai_client(engine) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert chunks[0].choices[0].delta.role == "assistant"
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == ANSWER and len(pieces) > 10
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
        assert len({chunk.id for chunk in chunks}) == 1

        plain = [
            chunk
            async for chunk in await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=6, stream=True, echo=True
            )
        ]
        whole = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, echo=True)
        assert "".join(chunk.choices[0].text for chunk in plain) == whole.choices[0].text
        assert whole.choices[0].text.startswith(PROMPT)
        assert plain[-1].choices[0].finish_reason == "length"


@pytest.mark.one_loop
async def test_several_answers_and_prompts(engine: Engine) -> None:
    async with openai_client(engine) as client:
        settings: Any = {"model": MODEL, "max_tokens": 8, "temperature": 1.0, "seed": 5, "n": 3}
        first = await client.completions.create(prompt=[PROMPT, "Hello"], **settings)
        again = await client.completions.create(prompt=[PROMPT, "Hello"], **settings)
        texts = [choice.text for choice in first.choices]
        assert [choice.index for choice in first.choices] == list(range(6))
        assert texts == [choice.text for choice in again.choices]  # the seed decides
        assert len(set(texts[:3])) == 3  # and each answer has its own
        assert first.usage is not None and first.usage.completion_tokens == 48

        alone = await client.completions.create(prompt="Hello", **{**settings, "n": 1})
        assert alone.choices[0].text == texts[3]

        streamed: dict[int, str] = {}
        async for chunk in await client.completions.create(
            prompt=[PROMPT, "Hello"], stream=True, **settings
        ):
            (choice,) = chunk.choices
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
        assert [streamed[index] for index in range(6)] == texts


@pytest.mark.one_loop
async def test_token_ids_as_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    async with openai_client(engine) as client:
        text = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5)
        tokens = await client.completions.create(model=MODEL, prompt=ids, max_tokens=5)
        both = await client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=5)
        assert [choice.text for choice in both.choices] == [text.choices[0].text] * 2
        assert tokens.choices[0].text == text.choices[0].text


@pytest.mark.one_loop
async def test_logprobs(engine: Engine) -> None:
    messages: Any = QUESTION
    result = await engine.generate(QUESTION, max_tokens=4, logprobs=2)
    assert result.logprobs is not None
    wanted = [round(float(logprob), 4) for logprob in result.logprobs]
    async with openai_client(engine) as client:
        settings: Any = {"model": MODEL, "messages": messages, "max_tokens": 4, "logprobs": True}
        chat = await client.chat.completions.create(top_logprobs=2, **settings)
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content or []
        assert [round(item.logprob, 4) for item in content] == wanted
        assert "".join(item.token for item in content) == "I am fine,"
        assert bytes(b for item in content for b in item.bytes or ()) == b"I am fine,"
        assert all(len(item.top_logprobs) == 2 for item in content)
        assert all(item.top_logprobs[0].token == item.token for item in content)

        streamed = [
            item
            async for chunk in await client.chat.completions.create(stream=True, **settings)
            for item in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ()
        ]
        assert [round(item.logprob, 4) for item in streamed] == wanted

        text = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, logprobs=2)
        logprobs = text.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.text_offset
        assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == 3
        assert [len(top) for top in logprobs.top_logprobs or ()] == [2, 2, 2]
        assert logprobs.text_offset[0] == 0 and sorted(logprobs.text_offset) == logprobs.text_offset


@pytest.mark.one_loop
async def test_sampling_arguments_reach_the_engine(engine: Engine) -> None:
    messages: Any = QUESTION
    usual = engine.tokenizer.encode("I", add_special_tokens=False)[0]
    settings: Any = {"model": MODEL, "messages": messages, "max_tokens": 12}
    async with openai_client(engine) as client:
        biased = await client.chat.completions.create(logit_bias={str(usual): -100}, **settings)
        assert not (biased.choices[0].message.content or "").startswith("I ")
        plain = await engine.generate(PROMPT, max_tokens=24)
        for penalty in ("presence_penalty", "frequency_penalty"):
            given: Any = {"max_tokens": 24, penalty: 2.0}
            expected = await engine.generate(PROMPT, **given)
            punished = await client.completions.create(model=MODEL, prompt=PROMPT, **given)
            assert punished.choices[0].text == expected.text != plain.text
        more: Any = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True}
        expected = await engine.generate(
            QUESTION, max_tokens=12, temperature=0.9, top_p=0.8, seed=3, **more
        )
        sampled = await client.chat.completions.create(
            temperature=0.9, top_p=0.8, seed=3, extra_body=more, **settings
        )
        assert sampled.choices[0].message.content == expected.text


async def test_defaults_of_the_server(engine: Engine) -> None:
    async with calling(server.app(engine, sampling={"max_tokens": 3}, name="owl")) as client:
        body = {"model": "owl", "messages": QUESTION}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["model"] == "owl"
        assert answer["usage"]["completion_tokens"] == 3
        body["max_tokens"] = 2  # type: ignore[assignment]
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 2


async def test_openai_errors(engine: Engine) -> None:
    messages: Any = QUESTION
    async with openai_client(engine, api_key="secret") as client:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await client.models.list()
    async with openai_client(engine) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=messages)
        assert missing.value.code == "model_not_found" and MODEL in missing.value.message
        with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
            await client.chat.completions.create(model=MODEL, messages=messages, temperature=1000)
        assert wrong.value.type == "invalid_request_error"
        assert wrong.value.request_id
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=MODEL, prompt="word " * 3000)
        assert too_long.value.code == "context_length_exceeded"


# -- Anthropic


async def test_anthropic_client(engine: Engine) -> None:
    messages: Any = QUESTION
    async with anthropic_client(engine) as client:
        settings: Any = {"model": MODEL, "messages": messages}
        message = await client.messages.create(max_tokens=50, **settings)
        (block,) = message.content
        assert block.type == "text" and block.text == ANSWER
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (17, 12)

        cut = await client.messages.create(max_tokens=2, **settings)
        assert cut.stop_reason == "max_tokens"

        stopped = await client.messages.create(
            max_tokens=50, stop_sequences=["never", " you"], **settings
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " you")
        assert stopped.content[0].type == "text" and stopped.content[0].text == "I am fine, thank"

        counted = await client.messages.count_tokens(**settings)
        assert counted.input_tokens == 17

        async with client.messages.stream(max_tokens=50, **settings) as stream:
            pieces = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(pieces) == ANSWER and len(pieces) > 10
        assert final.stop_reason == "end_turn" and final.usage.output_tokens == 12


@pytest.mark.one_loop
async def test_an_answer_that_has_begun_is_gone_on_with(engine: Engine) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "I am fine, thank"}]
    async with anthropic_client(engine) as client:
        message = await client.messages.create(model=MODEL, messages=begun, max_tokens=50)
        assert message.content[0].type == "text"
        assert "you. How are you?" in message.content[0].text
        assert message.usage.input_tokens == 17 + 5


@pytest.mark.one_loop
async def test_system_and_blocks(engine: Engine) -> None:
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello! How are you?"}]}]
    system: Any = [{"type": "text", "text": "Be kind."}]
    async with anthropic_client(engine) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=asked, system=system)
        as_text = await client.messages.count_tokens(model=MODEL, messages=asked, system="Be kind.")
        assert counted.input_tokens == as_text.input_tokens > 17


async def test_anthropic_errors(engine: Engine) -> None:
    messages: Any = QUESTION
    async with anthropic_client(engine, api_key="secret") as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.messages.create(model=MODEL, messages=messages, max_tokens=1)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
        assert refused.value.request_id
    async with anthropic_client(engine) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", messages=messages, max_tokens=1)
        image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        with pytest.raises(anthropic.BadRequestError, match="text and tools only"):
            await client.messages.create(model=MODEL, messages=image, max_tokens=1)


async def test_keys_are_taken_in_both_forms(engine: Engine) -> None:
    application = server.app(engine, api_key="secret")
    for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        async with calling(application, **headers) as client:
            assert (await client.get("/v1/models")).status_code == 200
    for headers in ({}, {"authorization": "Bearer secre"}, {"x-api-key": "secret2"}):
        async with calling(application, **headers) as client:
            answer = await client.get("/v1/models")
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/")).status_code == 200
            assert (await client.get("/stats")).status_code == 401
            assert (await client.get("/metrics")).status_code == 401
