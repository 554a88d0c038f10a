"""The open loop: every request leaves at its time, whatever happened to those before."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lab.load.accounting import Clock, Sent
from lab.load.stream import Answer, Failure
from lab.load.strict import Strict
from lab.load.workers import NoMetrics, Reading, read
from lab.load.workload import Request


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. ``base``: the address before ``/v1``. timeout: seconds for one whole answer.

    ids: the chunks are to bring the ids of their tokens, in place of a count with each.
    """

    base: str
    model: str
    timeout: float = 600.0
    ids: bool = False

    def body(self, request: Request, new: int) -> dict[str, Any]:
        """A completion that runs to its full length and lets its chunks be counted."""
        count = {"return_token_ids": True} if self.ids else {}
        often = {} if self.ids else {"continuous_usage_stats": True}
        return {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, **often},
            **count,
        }


class Unusable(Exception):
    """The endpoint cannot be loaded at all: nothing was measured."""


@dataclass
class Log:
    """What a run leaves; filled while it runs, so that what is there when it breaks is kept.

    began: when its seconds begin, on the clock that only runs.
    """

    began: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    clocks: list[Clock] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def digest(text: str) -> str:
    """What tells two answers apart, short enough to be kept for each of them."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


Progress = Callable[[float, int, int, int], None]


@dataclass
class Loop:
    """One run against one endpoint.

    ``workers``: metrics addresses by name. ``progress`` is told seconds, sent, done and failed. ``over``: whether to
    send no more; what was sent is waited for.
    """

    endpoint: Endpoint
    requests: Iterable[Request]
    new: int
    workers: Mapping[str, str] = field(default_factory=dict)
    every: float = 1.0
    progress: Progress = lambda *_: None
    clock: Callable[[], Clock] = lambda: Clock(time.monotonic(), time.time())
    over: Callable[[], bool] = lambda: False

    async def run(self, log: Log) -> None:
        """Send everything and wait for every end. Raises Unusable if the endpoint or the model is not there."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            await self._there(session)
            await self._look(session, log)
            self._open: dict[int, Sent] = {}
            start = log.began = time.monotonic()
            watch = asyncio.create_task(self._watch(session, log, start))
            tasks: list[asyncio.Task[None]] = []
            try:
                # Whatever is lazy is made here, before its time, and forgotten with its answer.
                for request in self.requests:
                    await asyncio.sleep(max(start + request.at - time.monotonic(), 0))
                    if self.over():
                        break
                    tasks.append(asyncio.create_task(self._one(session, request, start, log)))
                await asyncio.gather(*tasks)
            finally:
                for task in (watch, *tasks):
                    task.cancel()
                ended, *_ = await asyncio.gather(watch, *tasks, return_exceptions=True)
                if isinstance(ended, Exception):
                    log.troubles.append(f"nobody looked at clocks and metrics after: {ended!r}")
                log.sent += self._open.values()
                log.sent.sort(key=lambda one: one.number)
            await self._look(session, log)

    async def _there(self, session: aiohttp.ClientSession) -> None:
        """A model that the endpoint does not serve is found before the first request."""
        try:
            async with session.get(
                f"{self.endpoint.base}/v1/models", timeout=aiohttp.ClientTimeout(total=30)
            ) as answer:
                listed = await answer.json(content_type=None)
                names = [str(model["id"]) for model in listed["data"]]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unusable(f"{self.endpoint.base} does not answer: {error!r}") from error
        except (ValueError, LookupError, TypeError):
            return  # It does not list its models; a wrong one shows as a status then.
        if names and self.endpoint.model not in names:
            raise Unusable(f"{self.endpoint.base} serves {', '.join(names)}, not {self.endpoint.model}")

    async def _look(self, session: aiohttp.ClientSession, log: Log) -> None:
        log.clocks.append(self.clock())
        for name, address in self.workers.items():
            try:
                async with session.get(f"{address}/metrics", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                    text = (await answer.read()).decode(errors="replace")
                at = time.monotonic() - log.began if log.began else 0.0
                log.readings.setdefault(name, []).append(read(text, at))
            except (aiohttp.ClientError, OSError, TimeoutError, NoMetrics) as error:
                trouble = f"metrics of {name} are missing: {error}"
                if trouble not in log.troubles:
                    log.troubles.append(trouble)

    async def _watch(self, session: aiohttp.ClientSession, log: Log, start: float) -> None:
        while True:
            failed = sum(1 for one in log.sent if one.failure is not None)
            self.progress(time.monotonic() - start, len(log.sent) + len(self._open), len(log.sent) - failed, failed)
            await asyncio.sleep(self.every)
            await self._look(session, log)

    async def _one(self, session: aiohttp.ClientSession, request: Request, start: float, log: Log) -> None:
        began = time.monotonic() - start
        self._open[request.number] = Sent(request.number, request.at, began, None, None)
        reader, marks, worker, left = Strict(self.new), list[float](), "", False
        limit = aiohttp.ClientTimeout(total=self.endpoint.timeout, sock_connect=30)
        try:
            async with session.post(
                f"{self.endpoint.base}/v1/completions", json=self.endpoint.body(request, self.new), timeout=limit
            ) as answer:
                worker = answer.headers.get("x-worker", "")
                if answer.status != 200:
                    said = (await answer.content.read(200)).decode(errors="replace")
                    reader.fail(Failure.STATUS, f"{answer.status}: {said}")
                elif answer.content_type != "text/event-stream":
                    reader.fail(Failure.CONTENT_TYPE, answer.content_type)
                else:
                    async for data in answer.content.iter_any():
                        now = time.monotonic() - start
                        marks += [now] * (reader.feed(data) > 0)
                        if left := 0 < request.leave <= reader.answer.chunks:
                            break
                    else:
                        reader.end()
        except TimeoutError:
            reader.fail(Failure.TIMEOUT, f"after {self.endpoint.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            reader.fail(Failure.REFUSED, str(error))
        except (aiohttp.ClientError, OSError) as error:
            reader.fail(Failure.CUT, repr(error))
        self._open.pop(request.number)
        log.sent.append(self._judged(request, began, reader.answer, marks, time.monotonic() - start, worker, left))

    @staticmethod
    def _judged(
        request: Request,
        began: float,
        answer: Answer,
        marks: list[float],
        ended: float,
        worker: str,
        left: bool,
    ) -> Sent:
        return Sent(
            request.number,
            request.at,
            began,
            marks[0] if marks else None,
            ended,
            answer.failure,
            answer.prompt_tokens,
            answer.cached_tokens,
            answer.tokens,
            tuple(b - a for a, b in itertools.pairwise(marks)),
            answer.counted,
            worker,
            digest(answer.text),
            answer.detail,
            left,
        )
