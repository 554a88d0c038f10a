"""One streamed answer, read strictly. It counts only with its finish reason and its closing marker.

The engine reports how many tokens it has made with every chunk (``continuous_usage_stats``), so that a chunk that is
lost, doubled or out of order shows in the count. Where a server does not, that check is said to be missing.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Failure(Enum):
    """How an answer can fail, by name."""

    STATUS = "status"  # the answer is not a 200
    CONTENT_TYPE = "content-type"  # a 200 that is no event stream
    ERROR = "error-in-200"  # an error event inside a 200
    MALFORMED = "malformed"  # an event that is no JSON object with choices
    LOST_MARKER = "lost-marker"  # the stream ended without [DONE]
    NO_FINISH = "no-finish-reason"  # [DONE] came, a finish reason did not
    AFTER_END = "after-end"  # text after the finish reason, or anything after [DONE]
    DUPLICATE = "duplicate-chunk"
    REORDERED = "reordered-chunk"
    LOST_CHUNK = "lost-chunk"  # the count of tokens at the end is not what was asked for or reported
    CUT = "cut"  # the connection broke
    TIMEOUT = "timeout"
    REFUSED = "refused"  # no connection


@dataclass
class Answer:
    """What one stream brought. ``tokens``: as the server counts them at the end."""

    failure: Failure | None = None
    detail: str = ""
    finish: str = ""
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False
    chunks: int = 0


@dataclass
class Reader:
    """Takes the bytes of an event stream as they come; ``answer`` is what is known so far.

    ``feed`` returns how many chunks with text were in the bytes, so that the caller can time them.
    """

    expected: int | None = None
    answer: Answer = field(default_factory=Answer)

    def __post_init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""
        self._data: list[str] = []
        self._done = False
        self._last = 0
        self._seen: set[str] = set()

    def fail(self, failure: Failure, detail: str = "") -> None:
        """The first failure counts."""
        if self.answer.failure is None:
            self.answer.failure, self.answer.detail = failure, detail[:300]

    def feed(self, data: bytes) -> int:
        try:
            self._rest += self._decode.decode(data)
        except UnicodeDecodeError as error:
            self.fail(Failure.MALFORMED, str(error))
            return 0
        with_text = 0
        # A CR may be the first half of a CRLF that is cut here: it waits for what follows.
        while (at := self._rest.find("\n")) >= 0:
            line, self._rest = self._rest[:at].removesuffix("\r"), self._rest[at + 1 :]
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(":")
                if name == "data":
                    self._data.append(value.removeprefix(" "))
            elif self._data:
                event, self._data = "\n".join(self._data), []
                with_text += self._event(event)
        return with_text

    def end(self) -> Answer:
        """The connection was closed in order."""
        if not self._done:
            self.fail(Failure.LOST_MARKER, f"after {self.answer.chunks} chunks")
        elif not self.answer.finish:
            self.fail(Failure.NO_FINISH)
        elif self.answer.counted and self._last != self.answer.tokens:
            self.fail(Failure.LOST_CHUNK, f"the last chunk said {self._last} tokens, the end {self.answer.tokens}")
        elif self.expected is not None and self.answer.finish == "length" and self.answer.tokens != self.expected:
            self.fail(Failure.LOST_CHUNK, f"{self.answer.tokens} of {self.expected} tokens")
        return self.answer

    def _event(self, event: str) -> bool:
        answer = self.answer
        if self._done:
            self.fail(Failure.AFTER_END, event)
            return False
        if event == "[DONE]":
            self._done = True
            return False
        try:
            content = json.loads(event)
            if "error" in content:
                self.fail(Failure.ERROR, json.dumps(content["error"]))
                return False
            choices = content["choices"]
            usage = content.get("usage") or {}
            if not choices:
                self._usage(usage)
                return False
            choice = choices[0]
            text = _text(choice)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.fail(Failure.MALFORMED, f"{error!r} in {event}")
            return False
        if answer.finish and text:
            self.fail(Failure.AFTER_END, event)
        if choice.get("finish_reason"):
            answer.finish = choice["finish_reason"]
        if text or usage:
            self._order(usage.get("completion_tokens"), event, bool(text))
        if usage:
            self._usage(usage)
        answer.text += text
        answer.chunks += bool(text)
        return bool(text)

    def _order(self, count: int | None, event: str, has_text: bool) -> None:
        """The count of made tokens grows with every chunk of text."""
        if count is None:
            return
        self.answer.counted = True
        if count < self._last:
            self.fail(Failure.REORDERED, f"{count} tokens after {self._last}: {event}")
        elif count == self._last and has_text and event in self._seen:
            self.fail(Failure.DUPLICATE, event)
        self._last = max(count, self._last)
        if has_text:
            self._seen = {event}

    def _usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.answer.tokens = usage.get("completion_tokens", self.answer.tokens)
        self.answer.prompt_tokens = usage.get("prompt_tokens", self.answer.prompt_tokens)
        self.answer.cached_tokens = details.get("cached_tokens", self.answer.cached_tokens)


def _text(choice: dict[str, Any]) -> str:
    """The text of a completion's or a chat's choice."""
    if "delta" in choice:
        return str(choice["delta"].get("content") or "")
    return str(choice["text"] or "")
