"""The endpoint: requests and answers as OpenAI's API has them, for chat and text completions.

Source of the fields: https://platform.openai.com/docs/api-reference (chat/create, completions/create).
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from llamac.base.errors import InputError
from llamac.inference.model import Sampling
from llamac.serve.engine import Engine, Request

PAGE = Path(__file__).with_name("page.html")
COMPLETION_TOKENS = 16  # of a text completion without max_tokens, as in OpenAI's API
CHECK_SECONDS = 0.5  # between looks whether the client is still there


class StreamOptions(BaseModel):
    include_usage: bool = False


class Body(BaseModel):
    """Fields of both kinds of completion. Fields that would change the answer and are not computed are
    accepted with the value that changes nothing; others are an error."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # not OpenAI's; 0: all tokens
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict, Field(max_length=0)] | None = None
    # Of the account, not of the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    def samplings(self) -> list[Sampling]:
        """Of the n answers."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        return [
            Sampling(temperature, self.top_k or 0, self.top_p or 1.0, (first + i) % 2**63)
            for i in range(self.n or 1)
        ]


class ChatBody(Body):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list, Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None


class TextBody(Body):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: Literal[False] | None = None
    logprobs: None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class Answer:
    """One choice: its pieces come through a queue, from the engine's thread to that of the event loop."""

    def __init__(self, ids: list[int], count: int, sampling: Sampling, stops: list[str]):
        loop = asyncio.get_running_loop()
        self.pieces = asyncio.Queue[tuple[str, str | Exception | None]]()

        def tell(piece: str, reason: str | Exception | None) -> None:
            loop.call_soon_threadsafe(self.pieces.put_nowait, (piece, reason))

        self.request = Request(ids, count, sampling, tell, stops)

    async def next(self, http: HttpRequest) -> tuple[str, str | None]:
        """The next piece, with the reason of the end behind the last one. A client that is gone cancels."""
        while True:
            try:
                piece, reason = await asyncio.wait_for(self.pieces.get(), CHECK_SECONDS)
            except TimeoutError:
                if await http.is_disconnected():
                    self.request.cancelled = True
                continue
            if isinstance(reason, Exception):
                raise reason
            return piece, reason


def error(message: str, status: int = 400, kind: str = "invalid_request_error") -> JSONResponse:
    body = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": body}, status_code=status)


class Completion:
    """An HTTP request's answers, one per prompt and choice, in OpenAI's form."""

    def __init__(self, name: str, body: Body, prompts: list[list[int]], engine: Engine, limit: int | None):
        self.name, self.body, self.prompts = name, body, prompts
        self.is_chat = isinstance(body, ChatBody)
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        counts = [limit or max(1, engine.room(len(ids))) for ids in prompts]
        for ids, count in zip(prompts, counts):
            engine.check(ids, count)
        self.answers = [
            Answer(ids, count, sampling, body.stops())
            for ids, count in zip(prompts, counts)
            for sampling in body.samplings()
        ]
        engine.submit([answer.request for answer in self.answers])

    def cancel(self) -> None:
        for answer in self.answers:
            answer.request.cancelled = True

    def object(self, choices: list[dict], kind: str, **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.name}
        return head | {"choices": choices} | more

    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        made = sum(answer.request.tokens for answer in self.answers)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    async def whole(self, http: HttpRequest) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(self.answers):
            text, reason = "", None
            while reason is None:
                piece, reason = await answer.next(http)
                text += piece
            content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            choices.append({"index": i, **content, "logprobs": None, "finish_reason": reason})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self.object(choices, kind, usage=self.usage())

    async def events(self, http: HttpRequest) -> AsyncIterator[str]:
        """Server-sent events, a chunk per piece of text; the answers in turns as their pieces come."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        wants_usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        empty = {"usage": None} if wants_usage else {}

        def event(i: int, delta: dict, text: str, reason: str | None = None) -> str:
            content = {"delta": delta} if self.is_chat else {"text": text}
            choice = {"index": i, **content, "logprobs": None, "finish_reason": reason}
            return f"data: {json.dumps(self.object([choice], kind, **empty), ensure_ascii=False)}\n\n"

        waits = {asyncio.ensure_future(answer.next(http)): i for i, answer in enumerate(self.answers)}
        try:
            for i in range(len(self.answers)) if self.is_chat else ():
                yield event(i, {"role": "assistant", "content": ""}, "")
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    i = waits.pop(wait)
                    piece, reason = wait.result()
                    if piece:
                        yield event(i, {"content": piece}, piece)
                    if reason is None:
                        waits[asyncio.ensure_future(self.answers[i].next(http))] = i
                    else:
                        yield event(i, {}, "", reason)
            if wants_usage:
                yield f"data: {json.dumps(self.object([], kind, usage=self.usage()))}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as problem:  # the status of the answer is sent already
            text = json.loads(bytes(error(str(problem), kind="server_error").body))
            yield f"data: {json.dumps(text)}\n\n"
        finally:
            self.cancel()
            for wait in waits:
                wait.cancel()


def application(engine: Engine, name: str) -> FastAPI:
    """name: of the model, in answers. The engine is closed with the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="llamac", lifespan=lifespan)
    text = engine.model

    @app.exception_handler(RequestValidationError)
    async def refuse(_: HttpRequest, problem: RequestValidationError) -> JSONResponse:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return error(f"{where}: {first['msg']}, found {str(first.get('input'))[:60]!r}")

    @app.exception_handler(InputError)
    async def wrong(_: HttpRequest, problem: InputError) -> JSONResponse:
        return error(str(problem))

    async def answer(http: HttpRequest, body: Body, prompts: list[list[int]], limit: int | None) -> Any:
        completion = Completion(name, body, prompts, engine, limit)
        if body.stream:
            return StreamingResponse(completion.events(http), media_type="text/event-stream")
        try:
            return await completion.whole(http)
        finally:
            completion.cancel()

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        own = {"context": text.context, "chat": text.has_chat_template}
        model = {"id": name, "object": "model", "created": 0, "owned_by": "llamac", "llamac": own}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest, body: ChatBody) -> Any:
        ids = text.encode_chat(body.messages)
        return await answer(http, body, [ids], body.max_completion_tokens or body.max_tokens)

    @app.post("/v1/completions")
    async def complete(http: HttpRequest, body: TextBody) -> Any:
        prompts: Sequence[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not prompts:
            raise InputError("prompt: expected a text, texts, or token ids, found an empty list")
        ids = [text.encode(p) if isinstance(p, str) else p for p in prompts]
        return await answer(http, body, ids, body.max_tokens or COMPLETION_TOKENS)

    return app


class Server(uvicorn.Server):
    """Says where it listens once it does."""

    def __init__(self, app: FastAPI, host: str, port: int, name: str):
        super().__init__(uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=1))
        self._name = name

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            line = f"{self._name}: chat at {address}, OpenAI's API at {address}/v1; Ctrl-C ends it"
            print(line, flush=True)
