"""What the attribution of bounded packing reads, pairs and says; and that nothing planted escapes it. No engines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks import bounded_pack, engines, pack_plot
from benchmarks.bounded_pack import Cell, Lines, Transfer, cells, measure, rows, table, transfer, verdict
from benchmarks.engines import Engines, Lost
from lab.rig import boot, pack_times
from lab.rig.client import Answer, Request
from lab.rig.deployment import Deployment, Event, parse_events
from lab.rig.member import Spec


def queued(room: int, at: int) -> Event:
    return Event("queued", {"room": str(room), "at": str(at)})


def sent(room: int, began: int, ended: int, **more: int) -> Event:
    plain = {"gather": 1, "send": 2, "cpu": 3, "batches": 1, "blocks": 3, "bytes": 100, "buffers": 400}
    values = {"room": room, "began": began, "ended": ended, **plain, **more}
    return Event("sent", {name: str(value) for name, value in values.items()})


def test_a_transfer_is_from_the_queue_to_the_end_of_the_last_send() -> None:
    found = transfer([queued(5, 1000)], [sent(5, 1010, 1030), sent(5, 1035, 1100)])
    assert found == Transfer(
        whole=100, wait=10, gather=2, send=4, rest=84, cpu=6, batches=2, descriptors=6, bytes=200, buffers=400
    )


def test_a_transfer_of_several_chunks_is_the_sum_of_them_without_the_time_between() -> None:
    chunks = [queued(5, 0), queued(5, 1000)]
    found = transfer(chunks, [sent(5, 5, 10), sent(5, 11, 20), sent(5, 1001, 1010), sent(5, 1011, 1015)])
    assert (found.whole, found.wait) == (35, 6)


@pytest.mark.parametrize(
    ("chunks", "sends"),
    [
        ([], []),
        ([queued(5, 0)], [sent(5, 1, 2)]),  # one rank's line is lost
        ([queued(5, 0)], [sent(5, 1, 2), sent(6, 1, 2)]),  # of two requests
        ([queued(5, 0), queued(5, 1)], [sent(5, 1, 2), sent(5, 2, 3)]),
        ([queued(5, 0)], [sent(5, 1, 2)] * 3),  # one is told twice
    ],
)
def test_lines_that_are_no_whole_transfer_are_no_figure(chunks: list[Event], sends: list[Event]) -> None:
    with pytest.raises(Lost, match="are no transfer to 2 ranks"):
        transfer(chunks, sends)


def took(whole: int) -> Transfer:
    return Transfer(whole, 1, 1, 1, whole - 3, 1, 2, 6, 100, 400)


@dataclass
class Scripted:
    """An asker whose arms take a known time and bring a known text."""

    time: dict[str, Callable[[int], int]]
    brings: Callable[[str, int], tuple[int, ...]] = lambda prefill, number: (1, 2)
    asked: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def text(self, prefill: str, decode: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
        self.decoded.append(prefill)
        return self.brings(prefill, self.decoded.count(prefill))

    def ask(self, prefill: str, decode: str, prompt: tuple[int, ...]) -> Transfer:
        self.asked.append(prefill)
        self.prompts.append(prompt)
        return took(self.time[prefill](self.asked.count(prefill)))


def run(asker: Scripted, pairs: int = 6, hot: bool = False) -> Cell:
    cell = Cell("c", 20, {"A": ("P-off", "D"), "B": ("P-on", "D")}, hot)
    measure(cell, pairs, asker, lambda text: None)
    return cell


def test_pairs_run_b_a_a_b_after_requests_that_are_decoded_and_do_not_count() -> None:
    asker = Scripted({"P-off": lambda number: 1000, "P-on": lambda number: 2000})
    cell = run(asker, 3)
    assert asker.decoded == ["P-off", "P-on"] * bounded_pack.CHECKED
    assert asker.asked == ["P-on", "P-off", "P-off", "P-on", "P-on", "P-off"]
    assert {arm: len(got) for arm, got in cell.got.items()} == {"A": 3, "B": 3}


def test_a_hot_cell_asks_for_what_it_has_filled() -> None:
    asker = Scripted({"P-off": lambda number: 1000, "P-on": lambda number: 2000})
    run(asker, 3, hot=True)
    assert len(set(asker.prompts)) == 1


def test_a_pair_is_a_new_prompt_the_same_for_both_arms() -> None:
    asker = Scripted({"P-off": lambda number: 1000, "P-on": lambda number: 2000})
    run(asker, 3)
    by_arm = {
        name: [one for one, by in zip(asker.prompts, asker.asked, strict=True) if by == name] for name in asker.time
    }
    assert by_arm["P-off"] == by_arm["P-on"] and len(set(by_arm["P-on"])) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [(500, "B takes longer"), (-500, "B is faster")],
)
def test_a_planted_difference_is_found_in_spite_of_a_drift(more: int, said: str) -> None:
    asker = Scripted({"P-off": lambda number: 1000 + 90 * number, "P-on": lambda number: 1000 + 90 * number + more})
    assert said in table([run(asker)])[-1]


def test_arms_that_are_alike_show_no_difference() -> None:
    asker = Scripted({"P-off": lambda number: 1000 + number % 3, "P-on": lambda number: 1000 + (number + 1) % 3})
    assert "no difference shown" in table([run(asker)])[-1]
    assert verdict(0.0, 0.0) == "no difference shown"


def test_a_text_that_differs_does_not_hold() -> None:
    asker = Scripted(
        {"P-off": lambda number: 1000, "P-on": lambda number: 1000},
        lambda prefill, number: (1, 3) if prefill == "P-on" and number == 2 else (1, 2),
    )
    (row,) = [row for row in rows(run(asker)) if row.name.endswith("different texts")]
    assert row.value == 1 and row.holds is False


def test_every_cell_of_the_issue_is_there_and_its_engines_are_in_the_boot() -> None:
    made = cells()
    assert {cell.name for cell in made} >= {
        f"{size}, {layout}" for size in ("within", "one row over", "4x") for layout in ("in order", "torn")
    }
    names = {part.name for part in boot.load(bounded_pack.BOOT).parts}
    assert {name for cell in made for arm in cell.arms.values() for name in arm} == names
    for cell in made:
        p, d = zip(*cell.arms.values(), strict=True)
        assert len(set(p)) == 2 and len(set(d)) == 1


def test_the_boots_buffer_holds_the_rows_that_the_cells_count_with() -> None:
    parts = [part for part in boot.load(bounded_pack.BOOT).parts if part.role == "prefill"]
    # Three layers of 576 numbers of four bytes: the tiny model's latent rows.
    assert {int(part.env["PATCHBUNDLE_RIG_PACK_BYTES"]) for part in parts} == {bounded_pack.FIT * 3 * 576 * 4}
    assert {"PATCHBUNDLE_RIG_PACK_TIMES" in part.env for part in parts} == {True}
    chunk = f"--chunked-prefill-size={bounded_pack.SIZES['4x']}"
    assert all(chunk in part.flags and f"--page-size={bounded_pack.PAGE}" in part.flags for part in parts)


# Lines of a log.


@pytest.fixture
def running(tmp_path: Path) -> Engines:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "P.log").write_bytes(b"")
    argv = ("--disaggregation-bootstrap-port=7",)
    specs = [Spec("P", argv, {}, (), "prefill", 5), Spec("D", (), {}, (), "decode", 6)]
    return Engines(Deployment(tmp_path, specs, tied=False))


def test_a_late_line_of_an_earlier_request_is_not_this_ones(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    log = running.running.folder / "logs" / "P.log"
    rooms = iter((11, 12))
    late: list[str] = []

    def send(route: Any, request: Request, timeout: float) -> Answer:
        room, half = next(rooms), bounded_pack.ROW * len(request.prompt) // 2
        first, second = (f"rig: sent room={room} began=2 ended=3 gather=0 send=1 cpu=1 batches=1 blocks=3 bytes={half} "
                         f"buffers=4 rank={rank}\n" for rank in (0, 1))  # fmt: skip
        with log.open("a") as out:
            out.write("".join(late) + f"rig: queued room={room} at=1\n" + first)
            out.write("" if not late and room == 11 else second)
        late[:] = [second]
        return Answer(ids=(1,))

    monkeypatch.setattr(engines, "send", send)
    asker = Lines(running)
    asker.text("P", "D", (1, 2))
    found = asker.ask("P", "D", (1, 2))
    assert found.batches == 2 and asker.known == {"11", "12"}


def test_a_line_that_never_comes_is_said(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LAG", 0.05)
    with pytest.raises(Lost, match="P told only 0 lines of 'sent'"):
        running.events("P", "sent", (), bool)


def test_a_send_that_is_told_twice_is_no_transfer(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "rig: sent room=3 began=2 ended=3 gather=0 send=1 cpu=1 batches=1 blocks=3 buffers=4"
    line = f"{plain} bytes={bounded_pack.ROW}\n"

    def send(route: Any, request: Request, timeout: float) -> Answer:
        (running.running.folder / "logs" / "P.log").write_text("rig: queued room=3 at=1\n" * 2 + line * 3)
        return Answer(ids=(1,))

    monkeypatch.setattr(engines, "send", send)
    with pytest.raises(Lost, match="P sent 20736 bytes of 2 rows of 6912"):
        Lines(running).ask("P", "D", (1, 2))


def test_a_request_that_fails_is_no_figure(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "send", lambda *_: Answer(error="status 500: no"))
    with pytest.raises(Lost, match="P to D: status 500: no"):
        running.ask("P", "D", Request((1,), 1))
    assert running.route("P", "D").bootstrap == 7


def test_engines_that_do_not_start_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Lost, match="no boot 'nothing'"), engines.up("nothing"):
        raise AssertionError("it started")


# Inside of an engine.


def test_the_plain_gather_packs_layer_after_layer_and_row_after_row() -> None:
    layers = [torch.randint(0, 255, (9, size), dtype=torch.uint8) for size in (4, 6)]
    wanted = torch.tensor([7, 0, 0, 8], dtype=torch.int64)
    pack = torch.zeros(4 * 10 + 3, dtype=torch.uint8)
    pack_times.copy_rows([layer.data_ptr() for layer in layers], wanted, pack, [4, 6])
    expected = np.concatenate([layer.numpy()[wanted.numpy()].reshape(-1) for layer in layers])
    assert pack.numpy()[:40].tolist() == expected.tolist() and not pack[40:].any()
    pack_times.copy_rows([layer.data_ptr() for layer in layers], wanted[:0], pack, [4, 6])
    assert pack.numpy()[:40].tolist() == expected.tolist()


@pytest.mark.parametrize("pages", [1, 2, 3, 8, 33])
def test_torn_pages_are_all_there_and_no_two_follow_each_other(pages: int) -> None:
    made = pack_times.torn(torch.arange(1, pages + 1)).tolist()
    assert sorted(made) == list(range(1, pages + 1))
    assert pages < 3 or all(b - a != 1 for a, b in itertools.pairwise(made))


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setenv(f"PATCHBUNDLE_RIG_{name}", "1")


class Manager:
    """A manager whose send gathers once and writes two batches."""

    _dcp_pack_buffers = (SimpleNamespace(get_size=lambda: 64), SimpleNamespace(get_size=lambda: 36))

    def __init__(self, gather: Callable[[], None]) -> None:
        self.gather = gather

    def add_transfer_request(self, room: int) -> None:
        self.check_status(room)
        self.send_kvcache_dcp()

    def check_status(self, room: int) -> int:
        return room

    def send_kvcache_dcp(self) -> int:
        self.gather()
        return self._transfer_data("peer", [(0, 0, 5), (0, 0, 6)]) + self._transfer_data("peer", [(0, 0, 7)])

    def _transfer_data(self, session: str, blocks: list[tuple[int, int, int]]) -> int:
        if blocks[0][2] == 13:
            raise RuntimeError("broken")
        return 0


@pytest.mark.parametrize("on", [True, False])
def test_a_send_is_told_with_all_its_batches(
    on: bool, switched: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    if on:
        switched("PACK_TIMES")
    pack: Any = ModuleType("pack")
    pack.try_pack_dcp_src = lambda: None
    conn: Any = ModuleType("conn")
    conn.MooncakeKVManager = type("Own", (Manager,), dict(vars(Manager)))
    pack_times._time_gather(pack)
    pack_times._time_send(conn)
    for room in (5, 6):
        conn.MooncakeKVManager(pack.try_pack_dcp_src).add_transfer_request(room)
    events = parse_events(capsys.readouterr().err)
    assert [event.name for event in events] == (["queued", "sent"] * 2 if on else [])
    for event in events[1::2]:
        assert {name: event.number(name) for name in ("batches", "blocks", "bytes", "buffers")} == {
            "batches": 2, "blocks": 3, "bytes": 18, "buffers": 100,
        }  # fmt: skip
        assert event.number("began") <= event.number("ended") and event.number("cpu") >= 0
    if on:
        # One chunk to one rank: what the script reads is what was printed.
        found = transfer(events[2:3], events[3:4], ranks=1)
        assert found.whole == found.wait + found.gather + found.send + found.rest and found.bytes == 18


def test_without_their_variables_gather_and_pages_are_the_engines_own() -> None:
    for hook, name in ((pack_times._gather_plainly, "copy_mla_rows_into_pack"), (pack_times._tear, "clear")):
        module: Any = ModuleType("own")
        own = SimpleNamespace(clear=1, merge_and_sort_free=2)
        module.copy_mla_rows_into_pack, module.PagedTokenToKVPoolAllocator = 3, own
        hook(module)
        assert module.copy_mla_rows_into_pack == 3 and vars(own) == {"clear": 1, "merge_and_sort_free": 2}, name


def test_a_pool_is_torn_when_it_is_cleared_and_when_what_was_freed_comes_back(switched: Callable[[str], None]) -> None:
    switched("TORN")

    class Allocator:
        def clear(self) -> None:
            self.free_pages = torch.arange(1, 7)
            self.release_pages = torch.empty(0, dtype=torch.int64)

        def merge_and_sort_free(self) -> None:
            self.free_pages = torch.cat((self.free_pages, self.release_pages)).sort().values

    module: Any = SimpleNamespace(PagedTokenToKVPoolAllocator=Allocator)
    pack_times._tear(module)
    one = Allocator()
    one.clear()
    assert one.free_pages.tolist() == [1, 3, 5, 2, 4, 6]
    one.free_pages, one.release_pages = one.free_pages[2:], torch.tensor([3])
    one.merge_and_sort_free()
    assert one.free_pages.tolist() == [2, 4, 6, 3, 5]


def test_the_script_keeps_what_was_measured_when_the_engines_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: Lines, prefill: str, decode: str, prompt: tuple[int, ...]) -> Transfer:
        if "torn" in prefill:
            raise Lost("P-off-torn to D-torn: status 500")
        return took(1000)

    class Up:
        def __enter__(self) -> Any:
            return None

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(bounded_pack, "up", lambda boot: Up())
    monkeypatch.setattr(Lines, "text", lambda *_: (1,))
    monkeypatch.setattr(Lines, "ask", ask)
    out = tmp_path / "r.json"
    done = CliRunner().invoke(bounded_pack.main, ["--pairs", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert done.exit_code == 1 and result["trouble"] == "P-off-torn to D-torn: status 500"
    assert set(result["transfers"]) == {"within, in order", "one row over, in order", "4x, in order"}
    last = result["rows"][-1]
    assert (last["name"], last["value"], last["holds"]) == ("cells that were not measured", 5, False)
    assert "lab/rig/pack_times.py" in result["modules"]


def test_the_picture_beside_the_result_is_drawn_from_it(tmp_path: Path) -> None:
    result = Path(__file__).parents[2] / "evidence" / "rig" / "bounded-pack.json"
    pack_plot.draw(result, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == result.with_suffix(".svg").read_bytes()
