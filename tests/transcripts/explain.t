# Which patches touch a file, why, and how they come off.
$ apply.py apply --root tree --to beta-second > /dev/null
$ apply.py explain --root tree sglang/srt/engine.py
target:  /where/tree
version: 0.5.19
torch:   not seen
file:    sglang/srt/engine.py (patched at step 2)

alpha-first: patch 1, applied
  changes it: a toy
  why:   the stock toy cannot
  gate:  none; a toy
  off:   tools/apply.py revert --root /where/tree --to base  (and the 1 above it)

beta-second: patch 2, applied
  changes it: a toy
  why:   the stock toy cannot
  gate:  none; a toy
  off:   tools/apply.py revert --root /where/tree --to alpha-first
[0]
$ apply.py explain --root tree sglang/srt/old.py
target:  /where/tree
version: 0.5.19
torch:   not seen
file:    sglang/srt/old.py (base)

gamma-third: patch 3, not applied
  changes it: a toy
  why:   the stock toy cannot
  gate:  none; a toy
[0]

# A file that no patch touches; one that is none of the tree's.
$ apply.py explain --root tree sglang/_version.py
target:  /where/tree
version: 0.5.19
torch:   not seen
file:    sglang/_version.py (file)
no patch of this series touches it; whether it is the release's: check_sources.py --full
[3]
$ apply.py explain --root tree ../bundle/patches/series.toml
target:  /where/tree
version: 0.5.19
torch:   not seen
error: a file name is not a plain relative path [name]
  where:    FILE
  expected: a relative path without '.', '..', '//', backslashes or control characters
  found:    '../bundle/patches/series.toml': component '..'
  next:     name a file inside the tree, relative to its root
[1]
