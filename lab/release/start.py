"""Start of the one file: refuses it if a byte of it is not as it was built, then hands over to the tools inside.

Its last 64 bytes are the SHA-256 of all before them, in hexadecimal. That finds damage. It cannot find somebody who
made the file anew: for that, compare its SHA-256, or its signature, with the release's.

Old interpreters must come as far as the first refusal: no syntax here that Python 3.5 does not know.
"""

import hashlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any

# The interpreter names a module in an archive as a file below it.
PLACE = __file__[: -len("/__main__.py")]


def refuse(code: int, sentence: str, word: str, **facts: str) -> None:
    """As a refusal of the tools looks, which cannot be trusted yet."""
    lines = ["error: {} [{}]".format(sentence, word)]
    lines += [
        "  {:<10}{}".format(name + ":", facts[name]) for name in sorted(facts, key="where expected found next".find)
    ]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.exit(code)


if sys.version_info < (3, 10):
    found = "Python {}.{}".format(*sys.version_info[:2])
    refuse(2, "this Python is too old", "usage", expected="Python 3.10 or newer", found=found, where=sys.executable)

with open(PLACE, "rb") as stream:
    content = stream.read()
built, now = content[-64:].decode("latin-1"), hashlib.sha256(content[:-64]).hexdigest()
if now != built:
    refuse(
        1,
        "the file that carries the tools and the bundle is not as it was built",
        "damaged",
        where=PLACE,
        expected=built if built.isalnum() else "a SHA-256 at its end",
        found=now,
        next="copy it again, and compare its SHA-256 with the release's",
    )


class Carried:
    """Imports what the file carries from the very bytes that were looked at, and before anything that is installed.

    The interpreter's own way into an archive compiles each module twice, and reads the file again.
    """

    def __init__(self, archive: Any) -> None:
        self.archive = archive
        self.names = frozenset(archive.namelist())

    def find_spec(self: Any, name: str, path: Any = None, target: Any = None) -> Any:
        place = name.replace(".", "/")
        for file, is_package in ((place + "/__init__.py", True), (place + ".py", False)):
            if file in self.names:
                spec = ModuleSpec(name, self, origin=PLACE + "/" + file, is_package=is_package)
                spec.has_location = True
                return spec
        return None

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self._source(module.__spec__.origin), module.__spec__.origin, "exec", 0, True), module.__dict__)

    def get_source(self, name: str) -> str:
        """For the lines of a traceback."""
        return str(self._source(self.find_spec(name).origin).decode("utf-8"))

    def _source(self, origin: str) -> Any:
        return self.archive.read(origin[len(PLACE) + 1 :])


if __name__ == "__main__":
    import gc
    import io
    import shlex
    import zipfile
    from pathlib import Path

    # What is compiled at each start is kept: to look for garbage in it takes a tenth of the time.
    gc.disable()
    carried = Carried(zipfile.ZipFile(io.BytesIO(content)))
    del content
    sys.meta_path.insert(0, carried)

    from patchbundle import errors, store

    # The bundle too is read from these bytes. From here on a module may be there in parts.
    carried.archive = store.OPEN[Path(PLACE).resolve()] = store.Archive(carried.archive)
    errors.program = "python3 " + shlex.quote(sys.argv[0])
    # Before the whole command line is there: half of the time of what is plain.
    bundle = Path(PLACE).resolve() / "patchbundle" / "_bundle"
    if sys.argv[1:2] == ["exec"]:
        from patchbundle import guard

        guard.at_once(sys.argv[2:], bundle)
    elif sys.argv[1:2] in (["apply"], ["revert"]):
        from patchbundle import change

        change.at_once(sys.argv[1:], bundle)

    from patchbundle.cli import main_node

    gc.freeze()
    gc.enable()
    main_node(sys.argv[0])
