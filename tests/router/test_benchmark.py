"""The benchmark's arithmetic, and its compiled servers and clients."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.router import CASES, MANY, SECOND, Block, Generator, earlier, middle, pair, quartet, summary
from benchmarks.router_instructions import total
from lab.router.harness import free_ports


def test_the_interval_of_ten_values_is_from_the_second_to_the_ninth() -> None:
    assert middle([10, 9, 8, 7, 6, 5, 4, 3, 2, 1]) == (5.5, 2, 9)


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_of_too_few_values_the_interval_is_all_of_them(values: list[float]) -> None:
    assert middle(values)[1:] == (values[0], values[-1])


def test_two_blocks_are_judged_as_one() -> None:
    both = Block([0.001] * 99, 1.0, 0.1) + Block([0.5], 1.0, 0.1)
    assert both.figures == {"requests": 100, "per_second": 50.0, "p50_ms": 1.0, "p99_ms": 1.0, "cpu_us": 2000.0}


@pytest.mark.parametrize(("patched", "holds"), [(True, False), (False, None)])
def test_only_a_patched_case_has_a_bound(patched: bool, holds: bool | None) -> None:
    one = {
        "label": "x",
        "patched": patched,
        "figures": Block([0.001], 1.0, 0.0).figures,
        "ratios": {"per_second": 0.97, "p99_ms": 1.0},
    }
    rows = {row.name: row for row in summary("x", [one, one | {"label": "another", "ratios": {"per_second": 9.0}}])}
    assert rows["x: per_second to stock"].value == 0.97 and rows["x: per_second to stock"].holds is holds


def test_rounds_are_added_to_a_result_of_the_same_script_builds_and_settings_alone(tmp_path: Path) -> None:
    out, head = tmp_path / "out.json", {"script_sha256": "a", "seconds": 0.4}
    result = head | {"rounds": 2, "measured": []}
    out.write_text(json.dumps(result))
    assert earlier(out, head) == result
    for wanted, words in (({"script_sha256": "b"}, "script_sha256"), ({"stream": True}, "stream")):
        with pytest.raises(click.ClickException, match=f"another {words} than"):
            earlier(out, head | wanted)
    with pytest.raises(click.ClickException, match="--out is missing"):
        earlier(None, head)
    for text in ("{", None):
        out.unlink() if text is None else out.write_text(text)
        with pytest.raises(click.ClickException, match="holds no result"):
            earlier(out, head)


def test_a_file_of_counts_without_a_total_is_refused() -> None:
    assert total("events: Ir\ntotals: 42\n") == 42
    with pytest.raises(click.ClickException, match="no total"):
        total("events: Ir\n")


@pytest.fixture(scope="module", params=[True, False], ids=["stream", "json"])
def generator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return Generator(str(tmp_path_factory.mktemp("load")), request.param)


@contextlib.contextmanager
def serving(generator: Generator, ports: list[int]) -> Iterator[None]:
    process = subprocess.Popen(generator.servers(Path("/model"), ports))
    try:
        for port in ports:
            for _ in range(1000):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
        yield
    finally:
        process.kill()
        process.wait()


def ask(
    generator: Generator, seconds: float, requests: int, connections: int, *ports: int
) -> subprocess.CompletedProcess[bytes]:
    command = [str(generator.program), "ask", *map(str, (seconds, requests, connections, *ports))]
    return subprocess.run(command, input=generator.body, capture_output=True, timeout=60)


def test_every_connection_asks_all_ports_until_the_time_is_over(generator: Generator) -> None:
    ports = free_ports(2)
    with serving(generator, ports):
        done = ask(generator, 0.3, MANY, 8, *ports)
    lasted, *times = map(int, done.stdout.split())
    assert done.returncode == 0 and lasted >= 0.3e9 and len(times) >= 8
    assert all(0 < one < lasted for one in times)


@pytest.mark.parametrize(("requests", "connections"), [(100, 1), (100, 8), (3, 8), (0, 1)])
def test_so_many_requests_are_asked_by_all_connections_together(
    generator: Generator, requests: int, connections: int
) -> None:
    (port,) = free_ports(1)
    with serving(generator, [port]):
        done = ask(generator, 60, requests, connections, port)
    assert done.returncode == 0 and len(done.stdout.split()) == 1 + requests


@pytest.mark.parametrize("turned", [False, True])
def test_a_case_and_its_partner_alternate_and_are_asked_as_often(turned: bool) -> None:
    asked: list[tuple[object, int]] = []

    class Counter(Generator):
        def __init__(self) -> None: ...

        def block(self, bench: Any, connections: int, *_: Any, requests: int = 0, **__: Any) -> Block:
            asked.append((bench, requests))
            return Block([0.001] * requests, 1.0, 1.0 if bench == "case" else 3.0)

    benches: Any = ["case", "partner"]
    case, partner = quartet(Counter(), benches, 4, 100, turned)
    order = "partner case case partner" if turned else "case partner partner case"
    assert asked == [("case", 50), ("partner", 50), *((one, 100) for one in order.split())]
    assert (len(case.times), case.cpu, len(partner.times), partner.cpu) == (200, 2.0, 200, 6.0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_case_starts_beside_a_stock_router_of_its_own(
    case: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    @contextlib.contextmanager
    def bench(built: Any, *, environment: dict[str, str], policy: str, **_: Any) -> Iterator[None]:
        started.append((built, environment, policy))
        yield

    monkeypatch.setattr("benchmarks.router.Bench", bench)
    builds: Any = {"stock": "stock build", "patched": "patched build"}
    with contextlib.ExitStack() as stack:
        assert len(pair(stack, builds, case, turned, "random", lambda *_: [])) == 2
    variant, gates = CASES[case]
    both = [(f"{variant} build", gates, "random"), ("stock build", {}, "random")]
    assert started == (both[::-1] if turned else both)
    assert CASES[SECOND] == ("stock", {})


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\n"hi"',
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"hi"',
        b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n"hi"\r\n',
        b"",
    ],
    ids=["status", "no answer in it", "short", "no last chunk", "nothing"],
)
def test_an_answer_that_is_not_good_ends_the_measurement(generator: Generator, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asking = subprocess.Popen(
            [str(generator.program), "ask", "5", str(MANY), "1", str(server.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert asking.stdin is not None
        asking.stdin.write(generator.body)
        asking.stdin.close()
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)
        asking.stdin = None
        output, error = asking.communicate(timeout=60)
    assert asking.returncode == 1 and output == b"" and error
