"""The operations of speculative decoding against formulas that are written another way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.rig.standins import speculative


def _table() -> Tensor:
    return torch.arange(5 * 40, dtype=torch.int32).reshape(5, 40)


def test_slots_written_for_each_request_can_be_read_back() -> None:
    rows, start, end = torch.tensor([3, 1]), torch.tensor([2, 7]), torch.tensor([5, 11])
    slots = torch.tensor([90, 91, 92, 70, 71, 72, 73])
    table = _table()
    speculative.assign_req_to_token_pool(rows, table, start, end, slots, 40)
    assert table[3, 2:5].tolist() == [90, 91, 92]
    assert table[1, 7:11].tolist() == [70, 71, 72, 73]
    read = torch.zeros(7, dtype=torch.int64)
    speculative.assign_extend_cache_locs(rows, table, start, end, read, 40)
    assert torch.equal(read, slots)


def test_writing_slots_leaves_every_other_entry_alone() -> None:
    table, before = _table(), _table()
    speculative.assign_req_to_token_pool(
        torch.tensor([4]), table, torch.tensor([1]), torch.tensor([3]), torch.tensor([7, 8]), 40
    )
    differs = (table != before).nonzero().tolist()
    assert differs == [[4, 1], [4, 2]]


def test_a_request_without_new_tokens_takes_no_slot() -> None:
    table = _table()
    speculative.assign_req_to_token_pool(
        torch.tensor([0, 2]), table, torch.tensor([4, 0]), torch.tensor([4, 1]), torch.tensor([500]), 40
    )
    assert table[2, 0] == 500
    assert torch.equal(table[0], _table()[0])


def test_draft_slots_are_the_ones_that_follow_the_length() -> None:
    out = torch.zeros(2 * 6, dtype=torch.int64)
    table = _table()
    speculative.assign_draft_cache_locs_contiguous(torch.tensor([2, 0]), table, torch.tensor([5, 11]), out, 40, 2, 3)
    expected = torch.cat([table[2, 5:11], table[0, 11:17]]).long()
    assert torch.equal(out, expected)


def test_the_bonus_token_is_the_last_accepted_one() -> None:
    tokens = torch.tensor([[10, 11, -1, -1], [20, -1, -1, -1], [30, 31, 32, 33]])
    lens = torch.tensor([2, 1, 4])
    out = torch.zeros(3, dtype=torch.int32)
    speculative.fill_bonus_tokens(tokens, lens, out, 4)
    assert out.tolist() == [row[n - 1] for row, n in zip(tokens.tolist(), lens.tolist(), strict=True)]


def test_accepted_slots_are_packed_without_the_rejected_ones() -> None:
    index = torch.tensor([[0, 2, -1], [3, -1, -1]])
    slots, out = torch.tensor([100, 101, 102, 103]), torch.full((6,), -7)
    speculative.fill_accept_out_cache_loc(index, slots, out)
    assert out.tolist() == [100, 102, 103, -7, -7, -7]


def _build(
    parents: list[list[int]], chosen: list[list[int]], lengths: list[int], topk: int, mode: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, count = len(lengths), len(chosen[0]) + 1
    size = sum((length + count) * count for length in lengths) if mode == 0 else batch * count * count
    mask = torch.ones(size, dtype=torch.bool)
    positions = torch.zeros(batch * count, dtype=torch.int64)
    index, following, sibling = (torch.full((batch, count), -1) for _ in range(3))
    speculative.build_tree(
        torch.tensor(parents),
        torch.tensor(chosen),
        torch.tensor(lengths),
        mask,
        positions,
        index,
        following,
        sibling,
        topk,
        3,
        count,
        mode,
    )
    return mask, positions, index, following, sibling


def test_a_chain_is_linked_in_order_with_rising_positions() -> None:
    mask, positions, index, following, sibling = _build([[-1, 0, 1], [-1, 0, 1]], [[0, 1, 2], [0, 1, 2]], [7, 20], 1, 1)
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2
    assert positions.tolist() == [7, 8, 9, 10, 20, 21, 22, 23]
    assert torch.equal(mask.view(2, 4, 4), torch.ones(4, 4).tril().bool().expand(2, 4, 4))


def test_a_branching_tree_shows_each_token_exactly_its_ancestors() -> None:
    # Step 0 proposes candidates 0 and 1 below the root; candidates 2, 3 have the parent at place 1, which is 0.
    mask, positions, _, following, sibling = _build([[-1, 0, 1]], [[0, 1, 2, 3]], [5], 2, 1)
    ancestors = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 3}, 4: {0, 1, 4}}
    for token, seen in ancestors.items():
        assert set(mask.view(5, 5)[token].nonzero().flatten().tolist()) == seen
    assert positions.tolist() == [5, 6, 6, 7, 7]
    assert following.tolist() == [[1, 3, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1]]


def test_the_full_mask_holds_the_short_one_behind_an_open_prefix() -> None:
    lengths = [3, 6]
    short, *_ = _build([[-1, 0, 1]] * 2, [[0, 1, 2, 3]] * 2, lengths, 2, 1)
    full, *_ = _build([[-1, 0, 1]] * 2, [[0, 1, 2, 3]] * 2, lengths, 2, 0)
    at = 0
    for batch, length in enumerate(lengths):
        block = full[at : at + (length + 5) * 5].view(5, length + 5)
        assert bool(block[:, :length].all())
        assert torch.equal(block[:, length:], short.view(2, 5, 5)[batch])
        at += (length + 5) * 5
    assert at == full.numel()


def test_a_packed_mask_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="mode 2"):
        _build([[-1, 0, 1]], [[0, 1, 2]], [4], 1, 2)


def _verify(candidates: list[list[int]], wanted: list[list[int]], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, count = len(candidates), len(candidates[0])
    index = torch.arange(batch * count).view(batch, count)
    following = torch.tensor([[*range(1, count), -1]] * batch)
    sibling = torch.full((batch, count), -1)
    predicts = torch.full((batch * count,), -1)
    accepted = torch.full((batch, steps), -1)
    number = torch.zeros(batch, dtype=torch.int32)
    speculative.verify_tree_greedy(
        predicts, accepted, number, torch.tensor(candidates), index, following, sibling, torch.tensor(wanted)
    )
    return predicts, accepted, number


def test_a_chain_is_accepted_as_far_as_the_target_agrees() -> None:
    predicts, accepted, number = _verify(
        [[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]], [[1, 2, 3, 4], [1, 7, 3, 4], [8, 2, 3, 4]], 4
    )
    assert number.tolist() == [3, 1, 0]
    assert accepted.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    # The root's and each accepted token's own next token; nothing behind the first disagreement.
    assert predicts.tolist() == [1, 2, 3, 4, 1, 7, -1, -1, 8, -1, -1, -1]


def test_a_sibling_is_tried_after_the_first_child() -> None:
    index = torch.tensor([[0, 1, 2]])
    predicts, accepted = torch.full((3,), -1), torch.full((1, 3), -1)
    number = torch.zeros(1, dtype=torch.int32)
    speculative.verify_tree_greedy(
        predicts,
        accepted,
        number,
        torch.tensor([[5, 6, 7]]),
        index,
        torch.tensor([[1, -1, -1]]),
        torch.tensor([[-1, 2, -1]]),
        torch.tensor([[7, 0, 4]]),
    )
    assert accepted.tolist() == [[0, 2, -1]]
    assert number.tolist() == [1]
    assert predicts.tolist() == [7, -1, 4]


def test_no_more_is_accepted_than_there_is_room_for() -> None:
    _, accepted, number = _verify([[9, 1, 2, 3]], [[1, 2, 3, 4]], 2)
    assert number.tolist() == [1]
    assert accepted.tolist() == [[0, 1]]
