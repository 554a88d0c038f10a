"""What the load generator itself costs: many streams of a scripted server whose every token has a known time.

The server is a process of its own and paces its tokens; what the generator adds shows as lateness of its sends, as gaps
longer than the pace, and as its own CPU time and memory.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Row, show
from lab import provenance
from lab.load.accounting import quantile
from lab.load.run import Endpoint, Log, Loop
from lab.load.workload import Workload, requests


def serve(ready: multiprocessing.connection.Connection, pace: float) -> None:
    """Answer completions with a token every ``pace`` seconds, until killed."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        new = (await request.json())["max_tokens"]
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        start = time.monotonic()
        for count in range(1, new + 1):
            await asyncio.sleep(max(start + count * pace - time.monotonic(), 0))
            choice = {"index": 0, "text": "x", "finish_reason": "length" if count == new else None}
            usage = {"prompt_tokens": 16, "completion_tokens": count}
            await out.write(f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n".encode())
        await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


@click.command()
@click.option("--streams", type=click.IntRange(1), default=200, show_default=True, help="At once.")
@click.option("--pace", type=float, default=0.05, show_default=True, help="Seconds a token of one stream.")
@click.option("--tokens", type=click.IntRange(2), default=100, show_default=True)
@click.option("--seconds", type=float, default=20.0, show_default=True, help="For how long requests arrive.")
@click.option("--prefix", type=click.IntRange(0), default=8, show_default=True)
@click.option("--suffix", type=click.IntRange(1), default=8, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here as JSON.")
@click.option("--json", "as_json", is_flag=True)
def main(
    streams: int, pace: float, tokens: int, seconds: float, prefix: int, suffix: int, out: Path | None, as_json: bool
) -> None:
    """Hold STREAMS streams open against a scripted server on this machine."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, pace), daemon=True)
    server.start()
    port = ours.recv()
    workload = Workload(rate=streams / (pace * tokens), seconds=seconds, prefix=prefix, suffix=suffix, new=tokens)
    log = Log()
    began = time.process_time()
    asyncio.run(Loop(Endpoint(f"http://127.0.0.1:{port}", "scripted"), requests(workload), tokens).run(log))
    used = time.process_time() - began
    server.kill()
    whole = max(one.ended or 0.0 for one in log.sent)
    gaps = [gap - pace for one in log.sent for gap in one.gaps]
    made = sum(one.tokens for one in log.sent)
    rows = [
        Row("streams at once, most", max_open([(one.started, one.ended or whole) for one in log.sent]), "streams"),
        Row("requests", len(log.sent), "requests"),
        Row("failed", sum(one.failure is not None for one in log.sent), "requests", "<= 0"),
        Row("late sends, p50", quantile([one.started - one.due for one in log.sent], 0.5) * 1e3, "ms"),
        Row("late sends, p99", quantile([one.started - one.due for one in log.sent], 0.99) * 1e3, "ms"),
        Row("added between tokens, p50", quantile(gaps, 0.5) * 1e3, "ms"),
        Row("added between tokens, p99", quantile(gaps, 0.99) * 1e3, "ms"),
        Row("CPU of the generator", used / whole * 100, "% of a core"),
        Row("CPU a token", used / made * 1e6, "us"),
        # Linux counts it in KiB.
        Row("memory, most", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB"),
    ]
    head = {**provenance.of(__file__, workload.seed), "workload": {**vars(workload), "pace": pace, "streams": streams}}
    if out is not None:
        result = {**head, "rows": [asdict(row) | {"holds": row.holds} for row in rows]}
        out.write_text(json.dumps(result, indent=1, default=lambda value: value.value) + "\n", encoding="utf-8")
    show(rows, as_json, provenance.of(__file__, workload.seed))


def max_open(spans: list[tuple[float, float]]) -> int:
    """The most spans that are open at the same moment."""
    now = most = 0
    for _, change in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        now += change
        most = max(most, now)
    return most


if __name__ == "__main__":
    main()
