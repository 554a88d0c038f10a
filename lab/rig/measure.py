"""What is measured on the answers and on the engines' own lines: plain functions from results to one number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.rig.client import BROUGHT, Answer, compare


@dataclass(frozen=True)
class Result:
    """What one send brought.

    Attributes:
        answers: in the order of the requests.
        events: for each engine of the send the observer's lines printed meanwhile, as (event, values).
        prefill, decode: names of its engines; the same for an engine alone, empty behind a router.
        seconds: how long all of it took.
        prompts: tokens of each request's prompt.
        refused: why a drained engine did not become idle, or an engine did not start; empty when it did.
        says: words that the error of a client that was told must hold.
    """

    answers: tuple[Answer, ...]
    events: Mapping[str, Sequence[tuple[str, Mapping[str, str]]]] = field(default_factory=dict)
    prefill: str = ""
    decode: str = ""
    seconds: float = 0.0
    prompts: tuple[int, ...] = ()
    refused: str = ""
    says: str = ""


Results = Mapping[str, Result]


@dataclass(frozen=True)
class Measure:
    """A number over ``arguments`` named sends.

    Attributes:
        about: one line for the docs.
        of: takes the results and the names; a name may carry a selection: ``send.retracted`` or ``send.kept`` of
            the requests, ``send.cp2`` of the transfers.
        signed: whether the number may be below 0.
    """

    about: str
    arguments: int
    of: Callable[[Results, Sequence[str]], float]
    signed: bool = False


class NothingToMeasure(Exception):
    """A measure found no request or event to count, so its number would hold vacuously."""


def _answers(results: Results, name: str) -> tuple[Answer, ...]:
    send, _, selection = name.partition(".")
    answers = results[send].answers
    if selection == "retracted":
        answers = tuple(answer for answer in answers if answer.retractions)
    elif selection == "kept":
        answers = tuple(answer for answer in answers if not answer.retractions)
    elif selection and not re.fullmatch(r"cp\d+", selection):
        raise NothingToMeasure(f"no selection {selection!r}")
    if not answers:
        raise NothingToMeasure(f"{name} has no request")
    return answers


def _pairs(results: Results, names: Sequence[str]) -> tuple[list[Answer], list[Answer]]:
    """The requests of the first name, and the same requests of the second."""
    left, right = names
    send = left.partition(".")[0]
    chosen = {id(answer) for answer in _answers(results, left)}
    places = [index for index, answer in enumerate(results[send].answers) if id(answer) in chosen]
    others = results[right.partition(".")[0]].answers
    return [results[send].answers[place] for place in places], [others[place] for place in places]


def _same_texts(results: Results, names: Sequence[str]) -> float:
    return compare(*_pairs(results, names)).same_texts


def _different_texts(results: Results, names: Sequence[str]) -> float:
    difference = compare(*_pairs(results, names))
    return difference.requests - difference.same_texts


def _logprob(results: Results, names: Sequence[str]) -> float:
    difference = compare(*_pairs(results, names))
    if difference.errors:
        raise NothingToMeasure(f"{difference.errors} requests failed")
    return difference.logprob


def _first_difference(results: Results, names: Sequence[str]) -> float:
    """Smallest index of a differing token; the length of the texts when none differs."""
    left, right = _pairs(results, names)
    difference = compare(left, right)
    if difference.errors:
        raise NothingToMeasure(f"{difference.errors} requests failed")
    return min(difference.first_token.values(), default=min(len(answer.ids) for answer in left))


def _errors(results: Results, names: Sequence[str]) -> float:
    return sum(bool(answer.error) for answer in _answers(results, names[0]))


def _done(results: Results, names: Sequence[str]) -> float:
    return sum(not answer.error and bool(answer.ids) for answer in _answers(results, names[0]))


def _accept(results: Results, names: Sequence[str]) -> float:
    answers = [answer for answer in _answers(results, names[0]) if answer.verify_steps]
    if not answers:
        raise NothingToMeasure(f"{names[0]}: no request was verified")
    return sum(len(answer.ids) - 1 for answer in answers) / sum(answer.verify_steps for answer in answers)


def _retractions(results: Results, names: Sequence[str]) -> float:
    return sum(answer.retractions for answer in _answers(results, names[0]))


def _cached(results: Results, names: Sequence[str]) -> float:
    return sum(answer.cached for answer in _answers(results, names[0]))


def _prefill_cached(results: Results, names: Sequence[str]) -> float:
    answers = _answers(results, names[0])
    if any(answer.prefill_cached < 0 for answer in answers):
        raise NothingToMeasure(f"{names[0]}: the prefill engine's own answers were not seen")
    return sum(answer.prefill_cached for answer in answers)


def _decode_cached(results: Results, names: Sequence[str]) -> float:
    found = _events(results, names[0], "decode", "prefix")
    if not found:
        raise NothingToMeasure(f"{names[0]}: D looked nothing up in its cache")
    # A request may be looked up again while it waits for room: its last look-up counts.
    return sum({values["rid"]: int(values["tokens"]) for values in found}.values())


def _events(results: Results, name: str, side: str, event: str) -> list[Mapping[str, str]]:
    result = results[name.partition(".")[0]]
    return _of(result, result.prefill if side == "prefill" else result.decode, event)


def _of(result: Result, engine: str, event: str) -> list[Mapping[str, str]]:
    return [values for kind, values in result.events.get(engine, ()) if kind == event]


def _transfers(results: Results, name: str, kind: str) -> list[Mapping[str, str]]:
    source = re.fullmatch(r"cp(\d+)", name.partition(".")[2])
    found = [
        values
        for values in _events(results, name, "prefill", "transfer")
        if values["kind"] == kind and (source is None or values["cp"] == source[1])
    ]
    if not found:
        raise NothingToMeasure(f"{name}: no transfer of {kind} was seen")
    return found


def _blocks(results: Results, names: Sequence[str]) -> float:
    return max(int(values["blocks"]) for values in _transfers(results, names[0], "kv"))


def _bytes(results: Results, names: Sequence[str]) -> float:
    return sum(int(values["bytes"]) for values in _transfers(results, names[0], "kv"))


def _index_bytes(results: Results, names: Sequence[str]) -> float:
    return sum(int(values["bytes"]) for values in _transfers(results, names[0], "state"))


def _transfer_calls(results: Results, names: Sequence[str]) -> float:
    return len(_transfers(results, names[0], "kv"))


def _saved_bytes(results: Results, names: Sequence[str]) -> float:
    return _bytes(results, names[:1]) - _bytes(results, names[1:])


def _offloads(results: Results, name: str) -> list[Mapping[str, str]]:
    """What D said whenever it retracted a request."""
    found = _events(results, name, "decode", "offload")
    if not found:
        raise NothingToMeasure(f"{name}: nothing was retracted")
    return found


def _lost(results: Results, names: Sequence[str]) -> float:
    _offloads(results, names[0])
    return sum(int(values["tokens"]) for values in _events(results, names[0], "decode", "lost"))


def _rows_behind(results: Results, names: Sequence[str]) -> float:
    """The largest distance between committed rows and saved rows at a retraction."""
    found = _offloads(results, names[0])
    return max(abs(int(values["committed"]) - int(values["rows"])) for values in found)


def _evicted(side: str) -> Callable[[Results, Sequence[str]], float]:
    return lambda results, names: sum(int(found["tokens"]) for found in _events(results, names[0], side, "evicted"))


def _poisoned(results: Results, names: Sequence[str]) -> float:
    return sum(int(found["rows"]) for found in _events(results, names[0], "decode", "poisoned"))


def _sources(results: Results, names: Sequence[str]) -> float:
    return len({(values["cp"], values["tp"]) for values in _transfers(results, names[0], "kv")})


def _uneven(results: Results, names: Sequence[str]) -> float:
    """Requests of the busiest data-parallel rank of D minus those of the idlest; a rank without one is not seen."""
    ranks = [values["rank"] for values in _events(results, names[0], "decode", "room")]
    if len(set(ranks)) < 2:
        raise NothingToMeasure(f"{names[0]}: {len(set(ranks))} ranks of D took a request")
    counts = [ranks.count(rank) for rank in set(ranks)]
    return max(counts) - min(counts)


def _told(results: Results, names: Sequence[str]) -> float:
    """Requests whose client was told of the failure: by a status, or by an event of a stream that then ended well.

    Only those whose error holds the words of the send, if it asks for any.
    """
    words, answers = results[names[0]].says, _answers(results, names[0])
    return sum(answer.error.startswith(("status ", BROUGHT)) and words in answer.error for answer in answers)


def _held(results: Results, names: Sequence[str]) -> float:
    """Tokens and requests that idle engines still hold, all ranks together."""
    result = results[names[0]]
    if result.refused:
        raise NothingToMeasure(result.refused)
    told = [values for engine in result.events for values in _of(result, engine, "pools")]
    if not told or any(not _of(result, engine, "pools") for engine in result.events):
        raise NothingToMeasure(f"{names[0]}: not every engine told what it holds")
    return sum(abs(int(values["tokens"])) + abs(int(values["requests"])) for values in told)


def _pool_bytes(results: Results, names: Sequence[str]) -> float:
    _held(results, names)  # the engines must have told
    result = results[names[0]]
    return max(int(values["bytes"]) for engine in result.events for values in _of(result, engine, "pools"))


def _busiest(results: Results, names: Sequence[str]) -> float:
    """The largest share of one rank of P in the bytes of KV that were sent."""
    found = _transfers(results, names[0], "kv")
    of_rank: dict[tuple[str, str], int] = {}
    for values in found:
        key = (values["cp"], values["tp"])
        of_rank[key] = of_rank.get(key, 0) + int(values["bytes"])
    return max(of_rank.values()) / sum(of_rank.values())


def _drained(results: Results, names: Sequence[str]) -> float:
    result = results[names[0]]
    if result.refused:
        raise NothingToMeasure(result.refused)
    return result.seconds


def _refused(results: Results, names: Sequence[str]) -> float:
    return bool(results[names[0]].refused)


def rows(name: str, result: Result) -> list[dict[str, Any]]:
    """One row for each request of a send: what P and D found in their caches, and the bytes that P sent for it.

    A number that was not seen is ``None``: behind a router with several engines nobody knows which of them served.
    """
    rooms = {values["rid"]: values["room"] for values in _of(result, result.decode, "room")}
    found = {values["rid"]: int(values["tokens"]) for values in _of(result, result.decode, "prefix")}
    sent: dict[tuple[str, str], int] = {}
    for values in _of(result, result.prefill, "transfer"):
        key = (values["room"], values["kind"])
        sent[key] = sent.get(key, 0) + int(values["bytes"])
    made = []
    for index, answer in enumerate(result.answers):
        room = rooms.get(answer.rid)
        made.append(
            {
                "send": name,
                "request": answer.tag,
                "prompt": result.prompts[index] if index < len(result.prompts) else None,
                "tokens": len(answer.ids),
                "p_hit": answer.prefill_cached if answer.prefill_cached >= 0 else None,
                "d_hit": found.get(answer.rid),
                "kv_bytes": None if room is None else sent.get((room, "kv"), 0),
                "index_bytes": None if room is None else sent.get((room, "state"), 0),
                "retractions": answer.retractions,
                "accept": round(answer.accept_length, 2) or None,
                "error": answer.error,
            }
        )
    return made


def _jumps(results: Results, names: Sequence[str]) -> float:
    """How torn the worst of the retracted requests lay in the pool."""
    return max(int(values["jumps"]) for values in _offloads(results, names[0]))


def _lost_each(results: Results, names: Sequence[str]) -> float:
    return _lost(results, names) / _some_retractions(results, names[0])


def _accept_kept(results: Results, names: Sequence[str]) -> float:
    left, right = _pairs(results, names)
    tokens, steps = (sum(len(a.ids) - 1 for a in side) for side in (left, right)), _steps(left, right)
    return next(tokens) / steps[0] / (next(tokens) / steps[1])


def _extra_steps(results: Results, names: Sequence[str]) -> float:
    left, right = _pairs(results, names)
    more, fewer = _steps(left, right)
    return (more - fewer) / _some_retractions(results, names[0])


def _steps(*sides: Sequence[Answer]) -> list[int]:
    """Verification steps of each side."""
    found = [sum(answer.verify_steps for answer in side) for side in sides]
    if not all(found):
        raise NothingToMeasure("no request was verified")
    return found


def _some_retractions(results: Results, name: str) -> float:
    count = _retractions(results, [name])
    if not count:
        raise NothingToMeasure(f"{name}: nothing was retracted")
    return count


def _seconds(results: Results, names: Sequence[str]) -> float:
    return max(answer.seconds for answer in _answers(results, names[0]))


MEASURES: dict[str, Measure] = {
    "same_texts": Measure("requests whose texts are the same in two sends", 2, _same_texts),
    "different_texts": Measure("requests whose texts differ, failed ones included", 2, _different_texts),
    "logprob": Measure("largest difference of a log-probability before the first differing token", 2, _logprob),
    "first_difference": Measure("smallest index of a differing token", 2, _first_difference),
    "errors": Measure("requests that failed, also for their client gave up", 1, _errors),
    "done": Measure("requests that brought text", 1, _done),
    "accept": Measure("tokens a verification step", 1, _accept),
    "retractions": Measure("retractions of all requests", 1, _retractions),
    "cached": Measure("prompt tokens reported as cached (by a D: what P found)", 1, _cached),
    "decode_cached": Measure("prompt tokens that D found in its own cache", 1, _decode_cached),
    "prefill_cached": Measure("prompt tokens that P found in its cache", 1, _prefill_cached),
    "prefill_evicted": Measure("tokens that P evicted from its cache", 1, _evicted("prefill")),
    "decode_evicted": Measure("tokens that D evicted from its cache", 1, _evicted("decode")),
    "poisoned": Measure("draft loops of all ranks of D that began with a poisoned selection", 1, _poisoned),
    "blocks": Measure("blocks of P's largest transfer call", 1, _blocks),
    "bytes": Measure("bytes of KV that P sent", 1, _bytes),
    "index_bytes": Measure("bytes of index keys that P sent", 1, _index_bytes),
    "saved_bytes": Measure("bytes of KV of the first send minus those of the second", 2, _saved_bytes, True),
    "transfer_calls": Measure("transfer calls of P with KV", 1, _transfer_calls),
    "lost": Measure("accepted tokens thrown away at retractions", 1, _lost),
    "rows_behind": Measure(
        "the largest distance between committed and saved rows at a retraction, either way", 1, _rows_behind
    ),
    "lost_each": Measure("the same for each retraction", 1, _lost_each),
    "accept_kept": Measure(
        "tokens a step of the first send over those of the same requests in the second", 2, _accept_kept
    ),
    "extra_steps": Measure(
        "steps more than the same requests took in the second send, for each retraction", 2, _extra_steps, True
    ),
    "jumps": Measure("pages of a retracted request that do not follow the one before, the most", 1, _jumps),
    "sources": Measure("ranks of P that sent KV", 1, _sources),
    "uneven": Measure("requests of D's busiest data-parallel rank minus those of its idlest", 1, _uneven),
    "told": Measure(
        "failed requests whose client was told so by a status or an event, not by a cut connection", 1, _told
    ),
    "held": Measure("tokens and requests that drained engines still hold, all ranks together", 1, _held),
    "pool_bytes": Measure("bytes that a rank of drained engines has set aside for its pool, the most", 1, _pool_bytes),
    "busiest": Measure("share of P's busiest rank in the bytes of KV that it sent", 1, _busiest),
    "drained": Measure("seconds until all drained engines were idle", 1, _drained),
    "refused": Measure("engines that would not start, and said why in the words that were asked for", 1, _refused),
    "seconds": Measure("seconds of the slowest request", 1, _seconds),
}
