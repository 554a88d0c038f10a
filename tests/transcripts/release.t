# The bundle as it was released is filed; the lock names it.
$ apply.py apply --root tree
$ apply.py release 1.0
$ apply.py pin --offline
$ apply.py release 1.0

# The next bundle has another source. The tree of the old one is known.
$ printf 'def start(): ...\ndef stop(): ...\nMORE = 1\n' > bundle/sources/prefill/alpha.py
$ apply.py pin --offline
$ apply.py status --root tree
$ apply.py apply --root tree
$ apply.py apply --root tree --release 1.0 --to beta-second
$ apply.py apply --root tree --release 2.0
$ apply.py revert --root tree
$ check_sources.py --root tree --expect base --full
