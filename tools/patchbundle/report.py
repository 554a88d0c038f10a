"""What a verb says: text as it comes, or one JSON object at its end; and the exit code that goes with a failure.

Nothing here, or in ``change``, needs click: see ``change.at_once``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from patchbundle import __version__, output
from patchbundle.errors import BundleError, Exit, Reason

_SCHEMA = 1
# Verbs that change nothing.
_READERS = ("plan", "status", "check", "rebase-report", "env", "explain")


class Report:
    """What a verb has to say. Text goes out as it comes, JSON once at the end."""

    def __init__(self, verb: str, as_json: bool, verbose: bool) -> None:
        self.verb = verb
        self.as_json = as_json
        self.verbose = verbose
        self.result: dict[str, Any] = {}
        # Folders by the names that stand for them; None prints JSON as it is.
        self.hidden: dict[str, str] | None = None
        self._began = time.monotonic()

    def say(self, text: str = "") -> None:
        if not self.as_json:
            output.line(_shown(text))

    def detail(self, text: str) -> None:
        if self.verbose:
            self.say(text)

    def progress(self, text: str) -> None:
        """Something takes a while: tell on standard error, from the first second on."""
        if self.verbose or time.monotonic() - self._began > 1.0:
            output.line(f"… {_shown(text)}", error=True)

    def run(self, action: Callable[[], Exit]) -> NoReturn:
        """Do what the verb does, and end the process with the exit code that goes with how it ended."""
        error = None
        try:
            code = action()
        except BundleError as refusal:
            error = refusal
        except OSError as fault:
            where = fault.filename or "a call on the file system"
            error = BundleError(Reason.UNREADABLE, str(where), found=fault.strerror or str(fault))
        except MemoryError:
            error = BundleError(Reason.UNREADABLE, "a file of the bundle or the target", found="not enough memory")
        if error is not None:
            code = error.exit_code
        self._end(code, error)
        sys.exit(int(code))

    def _end(self, code: Exit, error: BundleError | None) -> None:
        if self.as_json:
            import json

            table = {
                "schema": _SCHEMA,
                "tool": __version__,
                "verb": self.verb,
                "exit": int(code),
                "result": self.result,
                "error": None if error is None else error.as_dict(),
            }
            if self.hidden is not None:
                from patchbundle import private

                table = private.scrubbed(table, self.hidden)
            output.line(json.dumps(_all_shown(table), indent=1, sort_keys=True))
        elif error is not None:
            output.line(_shown(str(error)), error=True)
        self._last_word(code)

    def _last_word(self, code: Exit) -> None:
        """If words were lost, say so where it may still be read: the exit code is that of what was done."""
        lost = output.lost()
        # Whoever pipes what a reader prints into head, or leaves a pager, has read enough.
        if lost is not None and not (isinstance(lost, BrokenPipeError) and self.verb in _READERS):
            why = (lost.strerror if isinstance(lost, OSError) else None) or str(lost)
            output.line(f"warning: output was lost ({why}); {self.verb} ended with exit code {int(code)}", error=True)


def _shown(text: str) -> str:
    """Text as it is printed: a file name's bytes as UTF-8, whatever the locale made of them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _all_shown(value: Any) -> Any:
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, Mapping):
        return {_all_shown(key): _all_shown(item) for key, item in value.items()}
    return [_all_shown(item) for item in value] if isinstance(value, (list, tuple)) else value
