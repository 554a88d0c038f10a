"""What can go wrong: one exception, one reason each, one exit code each."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from enum import Enum, IntEnum


def command(*words: object, tool: str = "tools/apply.py") -> str:
    """A command as it may be typed into a shell, whatever stands in its words."""
    return f"{tool} {shlex.join(str(word) for word in words)}"


# How the running command is called, where it is not one of the two of a checkout: see :func:`called`.
program = ""


def called(text: str) -> str:
    """A sentence with its commands as the person who reads it can type them."""
    if not program:
        return text
    return text.replace("tools/check_sources.py", f"{program} check").replace("tools/apply.py", program)


class Exit(IntEnum):
    """Exit codes of every verb. They are part of the interface: see docs/reference.md."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    NOTHING_TO_DO = 3
    RECOVERY_NEEDED = 4
    BUSY = 5
    FAILED = 6


class Reason(Enum):
    """Why something was refused. The value is the sentence that a person reads."""

    # The text of a diff.
    EMPTY = "the diff holds no file"
    MALFORMED = "the diff does not parse"
    TRUNCATED = "the diff does not end with a newline, so its end may be missing"
    LINE_ENDINGS = "the diff's own lines end with CR LF: something converted the file's line endings"
    TRAILING_JUNK = "a line belongs to no header and to no hunk"
    HEADER_IN_MESSAGE = "the text before the first file looks like part of a diff"
    HEADER_ORDER = "the header lines of a file are incomplete, repeated or out of order"
    CONTRADICTION = "the header lines of a file contradict each other"
    BINARY = "binary parts are not supported"
    RENAME = "renames and copies are not supported"
    FORMAT = "only the unified format is supported"
    NO_HUNKS = "a file has neither a hunk nor a declared change of mode or an empty file"
    BLANK_CONTEXT = "a context line has lost its leading space"
    NO_CHANGE = "a hunk changes nothing"
    HUNK_ORDER = "hunks overlap or are out of order"
    HUNK_START = "the two sides of a hunk header disagree about its place"
    HUNK_COUNT = "a hunk does not have as many lines as its header says"
    NUMBER = "a line number is not plausible"
    NO_CONTEXT = "a hunk without context may only stand at the end or the beginning of a file"
    NEWLINE_MARKER = "the no-newline marker is misplaced or translated"
    TIME_STAMP = "a time stamp stands after a name: some tools read it as a creation or a removal"
    SPECIAL_MODE = "only plain files with mode 100644 or 100755 are supported"
    DUPLICATE_FILE = "a file appears twice"
    # Names.
    NAME = "a file name is not a plain relative path"
    COLLISION = "two names differ only in case or in Unicode form"
    # Placement.
    CONTEXT_DIFFERS = "the file does not have the lines that the hunk expects"
    FILE_MISSING = "the file to change does not exist"
    FILE_EXISTS = "the file to create exists"
    PARENT = "a parent of the file is not a directory"
    MODE_DIFFERS = "the file does not have the mode that the diff expects"
    # The bundle.
    MANIFEST = "the manifest is not valid"
    CYCLE = "patches require each other in a circle"
    ORPHAN = "the bundle holds a file that nothing names"
    ARTIFACT = "a file of the bundle is not as locked"
    DAMAGED = "the file that carries the tools and the bundle is not as it was built"
    LOCK = "the lock is not valid"
    LOCK_STALE = "the lock and the series disagree"
    HEADER = "a patch header is not complete"
    SCAN = "the bundle holds something that must not be published"
    EVIDENCE = "a figure or a link upstream is not what stands behind it"
    SIGNATURE = "a signature is missing or wrong, or could not be made"
    NO_PROGRAM = "a program or package that this needs is not installed"
    OUTPUT = "the place for the output is not free"
    IMAGE = "the image is not sound, or not the one that was asked for"
    LAYER = "a layer of the image is not sound"
    LAUNCH = "this combination of gates and arguments would not start"
    # The target.
    NO_TARGET = "no target was found"
    TWO_TARGETS = "more than one target was found"
    WRONG_VERSION = "the target is another version than every pinned base"
    WRONG_TORCH = "the torch beside the target is not the one its base was released for"
    DRIFT = "the tree is at no level that the lock knows"
    UNKNOWN_LEVEL = "no such patch in this series"
    UNKNOWN_RELEASE = "no such release of this bundle is filed"
    RECORD = "the installed RECORD does not say what the tree holds"
    NOT_ATTESTED = "the tree is not the pinned release"
    NOT_EXPECTED = "the tree is not in the state that was asked for"
    NOT_WRITABLE = "a folder cannot be written to"
    OWNER = "the owner or the mode of a file cannot be kept"
    NO_SPACE = "the disk does not have enough room"
    BYTECODE = "compiled bytecode would hide the change"
    SWAPPED = "a file changed between the check and the write"
    BUSY = "another process is writing to this tree"
    RECOVERY_NEEDED = "an earlier run was interrupted"
    JOURNAL = "the journal of an interrupted run is damaged"
    PAST_RETURN = "the interrupted run can only be finished, not undone"
    STOPPED = "the file system failed while the tree was being changed"
    UNREADABLE = "a file or folder cannot be read"
    NO_BINARY = "the file is no build of the router"
    RUNNING = "processes run from this tree"
    OVERLAY = "an overlay cannot be made there"
    SHADOWED = "another copy of the engine would be imported in place of the verified tree"
    NO_COMMAND = "the command cannot be started"
    # Bases.
    ARCHIVE = "an archive is not the pinned one"
    NOT_FETCHED = "an archive is not in the cache and could not be fetched"


_EXITS = {
    Reason.BUSY: Exit.BUSY,
    Reason.RECOVERY_NEEDED: Exit.RECOVERY_NEEDED,
    Reason.JOURNAL: Exit.RECOVERY_NEEDED,
    Reason.PAST_RETURN: Exit.RECOVERY_NEEDED,
    Reason.STOPPED: Exit.FAILED,
    Reason.UNREADABLE: Exit.FAILED,
    Reason.NOT_FETCHED: Exit.FAILED,
}


# The next step where whoever refuses knows no better one.
_CHECK = "mend the bundle, then run: tools/check_sources.py"
_STATUS = "run: tools/apply.py status"
_NEXT = {
    Reason.DAMAGED: "copy it again, and compare its SHA-256 with the release's",
    Reason.LOCK_STALE: "run: tools/apply.py pin",
    Reason.EVIDENCE: "mend it, or measure or look up again, then run: make claims",
    Reason.LAUNCH: "switch the gate off with --off, or change what it needs",
    Reason.SIGNATURE: "do not use this bundle; see docs/provenance.md, 'Keys'",
    Reason.NO_PROGRAM: "install it, then run the command again",
    Reason.IMAGE: "name another image, or copy it again from where it came",
    Reason.LAYER: "build the image anew, or copy it again from where it came",
    Reason.OUTPUT: "name another place, or move away what stands there",
    Reason.NO_TARGET: "give --root DIR or --python EXE",
    Reason.TWO_TARGETS: "name one of them with --root",
    Reason.WRONG_VERSION: "point --root or --python at the release that the bundle is for",
    Reason.WRONG_TORCH: "use the image that the base was released for",
    Reason.DRIFT: _STATUS,
    Reason.UNKNOWN_LEVEL: "run: tools/apply.py status --json, which lists the levels",
    Reason.UNKNOWN_RELEASE: "ls patches/releases; what is not there was not filed",
    Reason.RECORD: "reinstall the distribution, or restore its RECORD",
    Reason.NOT_ATTESTED: "reinstall the distribution",
    Reason.NOT_EXPECTED: _STATUS,
    Reason.NOT_WRITABLE: "run where the tree can be written to, as its owner",
    Reason.OWNER: "run as the owner of the file",
    Reason.NO_SPACE: "make room, then run the command again",
    Reason.BYTECODE: "remove it as its owner, then run the command again",
    Reason.SWAPPED: _STATUS,
    Reason.BUSY: "wait for the other run to end, then run: tools/apply.py status",
    Reason.RECOVERY_NEEDED: "run: tools/apply.py recover --root DIR",
    Reason.JOURNAL: "do not delete it: see docs/recovery.md",
    Reason.PAST_RETURN: "run: tools/apply.py recover --root DIR",
    Reason.STOPPED: "mend the cause, then run the command again",
    Reason.UNREADABLE: "run as a user who may read the tree",
    Reason.NO_BINARY: "name the wheel, or sglang_router/sglang_router_rs.abi3.so of an installation",
    Reason.RUNNING: "stop them, then run the command again",
    Reason.OVERLAY: "name a new or empty folder outside of the tree; what a killed run left may be removed",
    Reason.SHADOWED: "start it from another folder, or set PYTHONSAFEPATH=1; take the other copy off PYTHONPATH",
    Reason.NO_COMMAND: "name a program that this user may start",
    Reason.ARCHIVE: "see config/bases.toml, then run: tools/apply.py fetch-base",
    Reason.NOT_FETCHED: "run: tools/apply.py fetch-base, with a network",
}


class BundleError(Exception):
    """A refusal: what, where, what was expected, what was found, and what to do next."""

    def __init__(
        self,
        reason: Reason,
        where: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        next_step: str = "",
        exit_code: Exit | None = None,
    ) -> None:
        self.reason = reason
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = called(next_step or _NEXT.get(reason, _CHECK))
        self.exit_code = exit_code if exit_code is not None else _EXITS.get(reason, Exit.REFUSED)
        super().__init__(str(self))

    def lines(self) -> list[str]:
        """The refusal as a person reads it, one line a fact."""
        lines = [f"error: {self.reason.value} [{self.code}]", f"  where:    {self.where}"]
        for label, text in (("expected", self.expected), ("found", self.found), ("next", self.next_step)):
            if text:
                lines.append(f"  {label + ':':<10}{text}")
        return lines

    @property
    def code(self) -> str:
        """The reason's stable word, as it stands in the JSON output."""
        return self.reason.name.lower().replace("_", "-")

    def as_dict(self) -> Mapping[str, str | int | None]:
        """The refusal as the JSON output carries it."""
        return {
            "reason": self.code,
            "message": self.reason.value,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "next": self.next_step,
            "exit": int(self.exit_code),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())
