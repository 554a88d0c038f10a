"""A reader that no event can break: what is of another type than it should be makes that one answer malformed.

It also counts the ids of the tokens where chunks bring them (``return_token_ids``). Unlike the counts that an engine
reports they tell of a chunk that was lost in the middle, and a router passes them on.
"""

from __future__ import annotations

import json
from typing import Any

from lab.load.stream import Answer, Failure, Reader

COUNTS = ("completion_tokens", "prompt_tokens")


class Strict(Reader):
    """As ``Reader``; whatever an event is, it raises nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ids: int | None = None

    def feed(self, data: bytes) -> int:
        try:
            return super().feed(data)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            self.fail(Failure.MALFORMED, f"{error!r}")
            return 0

    def end(self) -> Answer:
        answer = super().end()
        if self._ids is not None:
            said = f"the chunks brought {self._ids} tokens, the end says {answer.tokens}"
            if self._ids != answer.tokens:
                self.fail(Failure.LOST_CHUNK if self._ids < answer.tokens else Failure.DUPLICATE, said)
            answer.counted = True
        return answer

    def _event(self, event: str) -> bool:
        text = super()._event(event)
        # Few servers are asked for them, and the others' events are read once.
        if self.answer.failure is None and '"token_ids"' in event:
            ids = json.loads(event)["choices"][0].get("token_ids")
            if ids is not None:
                self._ids = (self._ids or 0) + len(list(ids))
        return text

    def _order(self, count: int | None, event: str, has_text: bool) -> None:
        super()._order(None if count is None else _count("completion_tokens", count), event, has_text)

    def _usage(self, usage: dict[str, Any]) -> None:
        for name in COUNTS:
            if name in usage:
                _count(name, usage[name])
        details = usage.get("prompt_tokens_details")
        # The engine says null where it has nothing to tell.
        if details is not None and details.get("cached_tokens") is not None:
            _count("cached_tokens", details["cached_tokens"])
            super()._usage(usage)
        else:
            super()._usage({**usage, "prompt_tokens_details": None})


def _count(name: str, value: Any) -> int:
    """A count of tokens. Raises TypeError if it is none."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is {value!r}, no count")
    return value
