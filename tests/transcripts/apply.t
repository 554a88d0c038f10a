# Apply everything, then once more.
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
$ apply.py apply --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 3 (gamma-third)
to:      level 3 (gamma-third)
nothing to do: the tree is at level 3 (gamma-third)
[3]

# One patch at a time; --to names the last one wanted.
$ apply.py revert --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 3 (gamma-third)
to:      level 0 (base)
  create  sglang/srt/old.py
  change  sglang/srt/engine.py
  change  sglang/srt/launch.sh
  change  sglang/srt/layers/pool.py
  change  sglang-0.5.19.dist-info/RECORD
  remove  sglang/srt/research/__init__.py
  remove  sglang/srt/research/alpha.py
  remove  sglang/srt/research/gates.py
  remove  sglang/srt/layers/wired.py
  remove  sglang/srt/research/kernels/beta.cu
  remove  sglang/srt/layers/deep/er/notes.txt
  remove  sglang/srt/research/receipt.json
done: level 0 (base); restart what runs from this tree
[0]
$ apply.py apply --root tree --to alpha-first
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 0 (base)
to:      level 1 (alpha-first)
  create  sglang/srt/research/__init__.py
  create  sglang/srt/research/alpha.py
  create  sglang/srt/research/gates.py
  create  sglang/srt/research/receipt.json
  change  sglang/srt/engine.py
  change  sglang-0.5.19.dist-info/RECORD
done: level 1 (alpha-first); restart what runs from this tree
[0]
$ apply.py apply --root tree --to beta-second --dry-run
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 1 (alpha-first)
to:      level 2 (beta-second)
  create  sglang/srt/layers/wired.py
  create  sglang/srt/research/kernels/beta.cu
  change  sglang/srt/engine.py
  change  sglang/srt/launch.sh
  change  sglang/srt/layers/pool.py
  change  sglang/srt/research/receipt.json
  change  sglang-0.5.19.dist-info/RECORD
dry run: nothing was written
[0]
$ apply.py apply --root tree --to beta-second -v
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 1 (alpha-first)
to:      level 2 (beta-second)
  create  sglang/srt/layers/wired.py
          absent -> sha256 HASH…, 38 bytes, mode 100644
  create  sglang/srt/research/kernels/beta.cu
          absent -> sha256 HASH…, 26 bytes, mode 100644
  change  sglang/srt/engine.py
          sha256 HASH…, 486 bytes, mode 100644 -> sha256 HASH…, 499 bytes, mode 100644
  change  sglang/srt/launch.sh
          sha256 HASH…, 32 bytes, mode 100644 -> sha256 HASH…, 32 bytes, mode 100755
  change  sglang/srt/layers/pool.py
          sha256 HASH…, 111 bytes, mode 100644 -> sha256 HASH…, 128 bytes, mode 100644
  change  sglang/srt/research/receipt.json
          sha256 HASH…, 189 bytes, mode 100644 -> sha256 HASH…, 206 bytes, mode 100644
  change  sglang-0.5.19.dist-info/RECORD
          sha256 HASH…, 1435 bytes, mode 100644 -> sha256 HASH…, 1606 bytes, mode 100644
… staging
… renaming
… clearing up
done: level 2 (beta-second); restart what runs from this tree
[0]

# The way down is another verb.
$ apply.py apply --root tree --to alpha-first
target:  /where/tree
version: 0.5.19
torch:   not seen
error: the tree is not in the state that was asked for [not-expected]
  where:    /where/tree
  expected: a tree at or below alpha-first
  found:    level 2 (beta-second)
  next:     run: tools/apply.py revert --to alpha-first --root /where/tree
[1]

# No such patch.
$ apply.py apply --root tree --to delta-fourth
target:  /where/tree
version: 0.5.19
torch:   not seen
error: no such patch in this series [unknown-level]
  where:    delta-fourth
  expected: base or one of alpha-first, beta-second, gamma-third
  next:     run: tools/apply.py status --json, which lists the levels
[1]

# A file was edited by hand.
$ echo 'edited = 1' >> tree/sglang/srt/engine.py
$ apply.py apply --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
error: the tree is at no level that the lock knows [drift]
  where:    /where/tree/sglang/srt/engine.py (drifted; nearest known state: level 2 (beta-second))
  expected: sha256 HASH…, 499 bytes, mode 100644
  found:    larger than what may be there, 510 bytes, mode 100644
  next:     undo the change, or reinstall the base; every file: tools/apply.py status --root /where/tree
[1]

# Arguments that do not go together.
$ apply.py apply --root tree --python python3
Usage: apply.py apply [OPTIONS]
Try 'apply.py apply --help' for help.

Error: give --root or --python, not both
[2]
$ apply.py apply --root nowhere
error: no target was found [no-target]
  where:    nowhere
  expected: a folder
  found:    none
  next:     give --root DIR or --python EXE
[1]
