"""Stand-ins for the operations of speculative decoding and of the request-to-token table.

The CUDA build of sgl-kernel ships only the Python wrappers of these ``*_cpu`` functions; the operations behind
them live in its CPU build. Every function here has its wrapper's signature and writes its outputs in place.

Shapes: ``B`` requests, ``N`` draft tokens a request (the first one is the last verified token), ``R`` rows of the
request-to-token table. Integer dtypes are those of the caller; nothing is converted except on assignment.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "assign_draft_cache_locs_contiguous",
    "assign_extend_cache_locs",
    "assign_req_to_token_pool",
    "build_tree",
    "fill_accept_out_cache_loc",
    "fill_bonus_tokens",
    "verify_tree_greedy",
]

FULL_MASK = 0
QLEN_ONLY = 1


def assign_req_to_token_pool(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write slots into the table: row ``req_pool_indices[i]``, columns ``start..end``, taken in order.

    Args:
        req_pool_indices: [B] int, rows of the table.
        req_to_token: [R, pool_len] int, written in place.
        start_offset, end_offset: [B] int, half-open column ranges.
        out_cache_loc: [sum(end - start)] int, the slots of all requests one after the other.
        pool_len: columns of the table.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read slots from the table, the reverse of :func:`assign_req_to_token_pool`; ``out_cache_loc`` is written."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        out_cache_loc[taken : taken + count] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        taken += count


def assign_draft_cache_locs_contiguous(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots that follow each request's length; ``out_cache_loc`` is written.

    Args:
        seq_lens: [B] int, first column to read.
        out_cache_loc: [B * topk * num_steps] int.
    """
    count = topk * num_steps
    for index, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[index * count : (index + 1) * count] = req_to_token[row, length : length + count].to(
            out_cache_loc.dtype
        )


def fill_bonus_tokens(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Pick each request's last accepted token.

    Args:
        accept_tokens: [B * accept_stride] or [B, accept_stride] int, accepted tokens first.
        accept_lens: [B] int, how many are accepted, at least 1.
        bonus_tokens: [at least B] int, written.
        accept_stride: slots a request has in ``accept_tokens``.
    """
    count = accept_lens.numel()
    last = torch.arange(count) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:count] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Gather the slots of the accepted tokens in order, skipping -1; ``accept_out_cache_loc`` is written."""
    kept = accept_index.reshape(-1)
    kept = kept[kept > -1].long()
    accept_out_cache_loc[: kept.numel()] = out_cache_loc[kept].to(accept_out_cache_loc.dtype)


def build_tree(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Turn the draft's selected candidates into a tree: links, positions and the mask of ancestors.

    Candidate ``c`` was made at draft step ``c // topk``; that quotient names its parent's place in
    ``parent_list`` (0 is the root). A token's children are a list: ``retrive_next_token`` points to the first,
    ``retrive_next_sibling`` to the next one. Tokens are linked from the last to the first, so children end up
    in rising order.

    Args:
        parent_list: [B, *] int, candidate number of each place.
        selected_index: [B, N-1] int, candidate number of each selected token.
        verified_seq_len: [B] int, tokens before the tree.
        tree_mask: bool, written. FULL_MASK: for each request [N, length + N], one after the other, the first
            ``length`` columns left as they are; QLEN_ONLY: [B, N, N].
        positions: [B * N] int, written: length plus depth in the tree.
        retrive_index, retrive_next_token, retrive_next_sibling: [B, N] int, written; the last two hold -1.

    Raises:
        NotImplementedError: a bit-packed mask.
        ValueError: a token whose parent was not selected.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode} has no CPU stand-in")
    count = draft_token_num
    before = 0
    for batch, length in enumerate(verified_seq_len.tolist()):
        chosen = selected_index[batch].tolist()
        parent = [0] * count
        for token in range(count - 1, 0, -1):
            retrive_index[batch, token] = batch * count + token
            place = chosen[token - 1] // topk
            if place > 0:
                parent[token] = chosen.index(int(parent_list[batch, place])) + 1
            first = int(retrive_next_token[batch, parent[token]])
            if first != -1:
                retrive_next_sibling[batch, token] = first
            retrive_next_token[batch, parent[token]] = token
        retrive_index[batch, 0] = batch * count
        for token in range(count):
            seen = {0, token}
            steps, at = 0, token
            while at:
                at = parent[at]
                seen.add(at)
                steps += 1
            positions[batch * count + token] = length + steps
            if tree_mask_mode == FULL_MASK:
                start = before + (length + count) * token + length
            else:
                start = (batch * count + token) * count
            tree_mask.view(-1)[start : start + count] = torch.tensor([other in seen for other in range(count)])
        before += (length + count) * count


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each request's tree from the root along the tokens that the target model would have chosen itself.

    Args:
        predicts: [B * N] int, written where a token was reached: the target's next token there.
        accept_index: [B, S] int, written: flat numbers of the reached tokens; holds -1 beyond them.
        accept_token_num: [B] int, written: reached tokens without the root.
        candidates: [B, N] int, the draft tokens.
        target_predict: [B, N] or [B * N] int, the target's choice after each draft token.
    """
    wanted = target_predict.reshape(-1)
    for batch in range(candidates.shape[0]):
        last = int(retrive_index[batch, 0])
        accept_index[batch, 0] = last
        reached = at = 0
        while reached < accept_index.shape[1] - 1:
            at = int(retrive_next_token[batch, at])
            while at != -1 and int(candidates[batch, at]) != int(wanted[last]):
                at = int(retrive_next_sibling[batch, at])
            if at == -1:
                break
            predicts[last] = wanted[last]
            reached += 1
            last = int(retrive_index[batch, at])
            accept_index[batch, reached] = last
        accept_token_num[batch] = reached
        predicts[last] = wanted[last]
