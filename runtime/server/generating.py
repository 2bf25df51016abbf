"""The endpoints that generate: a body in, answers out, whole or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..api import Chunk
from .admission import Ticket
from .answers import Piece
from .body import read_body
from .errors import ApiError, from_engine
from .logs import log
from .observing import RECORD, Record
from .outgoing import EventStream, send_json, wait_disconnect
from .preparing import Answer, Job, ReadCall, prepare
from .replies import Head, Streamed, Whole
from .service import Service


@dataclass(frozen=True, slots=True)
class Came:
    """A piece of an answer, or the error that ended it."""

    index: int
    piece: Piece
    error: Exception | None = None


class Generating:
    """An endpoint of one API.

    Args:
        service: what all endpoints share.
        read: understands a body.
        prefix: of the ids of replies.
        streamed, whole: make replies.
    """

    def __init__(
        self,
        service: Service,
        read: ReadCall,
        prefix: str,
        streamed: Callable[[Head], Streamed],
        whole: Callable[[Head], Whole],
    ) -> None:
        self._service = service
        self._read = read
        self._prefix = prefix
        self._streamed = streamed
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, record = self._service, scope[RECORD]
        with service.admission.admit() as ticket:
            body = await read_body(
                scope,
                receive,
                limit=service.settings.max_body,
                timeout=service.settings.body_timeout,
            )
            job = await service.work(prepare, service, self._read, self._prefix, body)
            service.admission.enlarge(ticket, len(job.answers))
            await self._attend(job, ticket, record, receive, send)

    async def _attend(
        self, job: Job, ticket: Ticket, record: Record, receive: Receive, send: Send
    ) -> None:
        """Generate and send, until it is done, the client leaves, or the server stops."""
        record.figures = {"prompt_tokens": sum(job.head.prompts), "stream": job.call.stream}
        events = EventStream(send, self._service.settings.send_timeout)
        reply = self._streamed(job.head)
        failure: ApiError | None = None
        with ticket.scope:
            try:
                await self._generate(job, record, reply, events, receive, send)
            except ClientDisconnect:
                record.disconnected = True
            except Exception as error:
                failure = from_engine(error)
                if failure.status >= 500 and not isinstance(error, ApiError):
                    log(
                        "generation failed",
                        level=logging.ERROR,
                        request_id=record.key,
                        kind=type(error).__name__,
                        problem=str(error),
                    )
        if ticket.cut and ticket.scope.cancelled_caught:
            failure = ApiError(503, "the server has stopped", code="stopping")
        if failure is None or record.disconnected:
            return
        record.code = failure.code
        if not events.begun:
            raise failure
        try:
            await events.write(reply.failure(failure))
            await events.close()
        except ClientDisconnect:
            record.disconnected = True

    async def _generate(
        self,
        job: Job,
        record: Record,
        reply: Streamed,
        events: EventStream,
        receive: Receive,
        send: Send,
    ) -> None:
        sender, receiver = anyio.create_memory_object_stream[Came](0)
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            with sender:
                for answer in job.answers:
                    group.start_soon(self._produce, answer, record, sender.clone())

            async def watch() -> None:
                await wait_disconnect(receive)
                record.disconnected = not record.complete
                group.cancel_scope.cancel()

            group.start_soon(watch)
            with receiver:
                try:
                    if job.call.stream:
                        await self._send_stream(job, record, reply, events, receiver)
                    else:
                        await self._send_whole(job, record, receiver, send)
                except Exception as error:  # outside, so that it does not come out as a group
                    failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _produce(
        self, answer: Answer, record: Record, sender: ObjectSendStream[Came]
    ) -> None:
        """Run one generation and pass on its pieces, each when it is asked for."""
        service = self._service
        async with sender:
            try:
                async with aclosing(answer.chunks) as chunks:
                    async for chunk in chunks:
                        service.tokens += 1
                        if chunk.result is not None:
                            service.failing = False
                            service.metrics.generated(chunk.result.stats)
                            _figures(record, chunk)
                        await sender.send(Came(answer.index, answer.reader.feed(chunk)))
                        if answer.reader.done:
                            return
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # nobody reads any more
            except Exception as error:
                service.failing = from_engine(error).status >= 500
                with suppress(anyio.BrokenResourceError):  # another answer has failed before
                    await sender.send(Came(answer.index, Piece(), error))

    async def _send_stream(
        self,
        job: Job,
        record: Record,
        reply: Streamed,
        events: EventStream,
        pieces: ObjectReceiveStream[Came],
    ) -> None:
        await events.write(reply.begin())
        left = len(job.answers)
        while left:
            came: Came | None = None
            with anyio.move_on_after(self._service.settings.keep_alive):
                came = await pieces.receive()
            if came is None:
                await events.write(reply.keep_alive)
                continue
            if came.error is not None:
                raise came.error
            if frames := reply.piece(came.index, came.piece):
                await events.write(frames)
            left -= came.piece.ended is not None
        record.complete = True
        await events.write(reply.end())
        await events.close()

    async def _send_whole(
        self, job: Job, record: Record, pieces: ObjectReceiveStream[Came], send: Send
    ) -> None:
        reply = self._whole(job.head)
        left = len(job.answers)
        while left:
            came = await pieces.receive()
            if came.error is not None:
                raise came.error
            reply.piece(came.index, came.piece)
            left -= came.piece.ended is not None
        record.complete = True
        with anyio.move_on_after(self._service.settings.send_timeout) as scope:
            await send_json(send, 200, reply.body())
        if scope.cancelled_caught:
            raise ClientDisconnect


def _figures(record: Record, chunk: Chunk) -> None:
    """Note what a generation has cost."""
    result = chunk.result
    if result is None or record.figures is None:
        return
    stats, figures = result.stats, record.figures
    figures["tokens"] = figures.get("tokens", 0) + len(result.tokens)
    figures["cached_tokens"] = figures.get("cached_tokens", 0) + result.cached_tokens
    figures["finish"] = result.finish_reason
    figures["queued_seconds"] = round(stats.queued_seconds, 4)
    figures["first_token_seconds"] = round(stats.time_to_first_token, 4)
    figures["tokens_per_second"] = round(stats.decode_tokens_per_second, 2)
    figures["hit_rate"] = round(stats.hit_rate, 4)
