"""Start of the one file: refuses it if a byte of it is not as it was built, then hands over to the tools inside.

Its last 64 bytes are the SHA-256 of all before them, in hexadecimal. That finds damage. It cannot find somebody who
made the file anew: for that, compare its SHA-256, or its signature, with the release's.

Old interpreters must come as far as the first refusal: no syntax here that Python 3.5 does not know.
"""

import hashlib
import sys

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
del content

if __name__ == "__main__":
    if sys.argv[1:2] == ["exec"]:
        from pathlib import Path

        from patchbundle import guard

        # Before the whole command line is there: half of a start's time.
        guard.at_once(sys.argv[2:], Path(PLACE).resolve() / "patchbundle" / "_bundle")

    from patchbundle.cli import main_node

    main_node(sys.argv[0])
