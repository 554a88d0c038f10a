# The bundle as it was released is filed; the lock names it.
$ apply.py apply --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 0 (base)
to:      level 3 (gamma-third)
  create  sglang/srt/research/__init__.py
  create  sglang/srt/research/alpha.py
  create  sglang/srt/research/gates.py
  create  sglang/srt/layers/wired.py
  create  sglang/srt/research/kernels/beta.cu
  create  sglang/srt/layers/deep/er/notes.txt
  create  sglang/srt/research/receipt.json
  change  sglang/srt/engine.py
  change  sglang/srt/launch.sh
  change  sglang/srt/layers/pool.py
  change  sglang-0.5.19.dist-info/RECORD
  remove  sglang/srt/old.py
done: level 3 (gamma-third); restart what runs from this tree
[0]
$ apply.py release 1.0
filed: patches/releases/1.0
next: tools/apply.py pin
[0]
$ apply.py pin --offline
changed: patches/pins.lock, bundle HASH
[0]
$ apply.py release 1.0
error: the manifest is not valid [manifest]
  where:    /where/bundle/patches/releases/1.0
  expected: a version that is not filed
  found:    a filed release
  next:     what was released does not change: file it under its own version
[1]

# The next bundle has another source. The tree of the old one is known.
$ printf 'def start(): ...\ndef stop(): ...\nMORE = 1\n' > bundle/sources/prefill/alpha.py
$ apply.py pin --offline
changed: patches/pins.lock, bundle HASH
[0]
$ apply.py status --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
level:   3 of 3 (gamma-third) of release 1.0
receipt: current
  patched at step 2   sglang/srt/engine.py
  patched at step 2   sglang/srt/launch.sh
  patched at step 3   sglang/srt/layers/deep/er/notes.txt
  patched at step 2   sglang/srt/layers/pool.py
  patched at step 2   sglang/srt/layers/wired.py
  absent              sglang/srt/old.py
  patched at step 1   sglang/srt/research/__init__.py
  patched at step 1   sglang/srt/research/alpha.py
  patched at step 1   sglang/srt/research/gates.py
  patched at step 2   sglang/srt/research/kernels/beta.cu
[0]
$ apply.py apply --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 3 (1.0:gamma-third)
to:      level 3 (gamma-third)
  change  sglang/srt/research/alpha.py
  change  sglang/srt/research/receipt.json
  change  sglang-0.5.19.dist-info/RECORD
done: level 3 (gamma-third); restart what runs from this tree
[0]
$ apply.py apply --root tree --release 1.0 --to beta-second
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 3 (gamma-third)
to:      level 2 (1.0:beta-second)
  create  sglang/srt/old.py
  change  sglang/srt/research/alpha.py
  change  sglang/srt/research/receipt.json
  change  sglang-0.5.19.dist-info/RECORD
  remove  sglang/srt/layers/deep/er/notes.txt
done: level 2 (1.0:beta-second); restart what runs from this tree
[0]
$ apply.py apply --root tree --release 2.0
target:  /where/tree
version: 0.5.19
torch:   not seen
error: no such release of this bundle is filed [unknown-release]
  where:    2.0
  expected: one of those filed: 1.0
  next:     ls patches/releases; what is not there was not filed
[1]
$ apply.py revert --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 2 (1.0:beta-second)
to:      level 0 (base)
  change  sglang/srt/engine.py
  change  sglang/srt/launch.sh
  change  sglang/srt/layers/pool.py
  change  sglang-0.5.19.dist-info/RECORD
  remove  sglang/srt/research/__init__.py
  remove  sglang/srt/research/alpha.py
  remove  sglang/srt/research/gates.py
  remove  sglang/srt/layers/wired.py
  remove  sglang/srt/research/kernels/beta.cu
  remove  sglang/srt/research/receipt.json
done: level 0 (base); restart what runs from this tree
[0]
$ check_sources.py --root tree --expect base --full
bundle:  HASH, 3 patches, 10 files as the lock says
filed:   1.0
target:  /where/tree
version: 0.5.19
torch:   not seen
holds:   sglang-0.5.19 at level 0 (base)
release: 10 files as in sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl, 0 extra
[0]
