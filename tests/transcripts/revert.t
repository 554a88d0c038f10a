$ apply.py revert --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 0 (base)
to:      level 0 (base)
nothing to do: the tree is at level 0 (base)
[3]
$ apply.py apply --root tree > /dev/null
$ apply.py revert --root tree --to beta-second
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 3 (gamma-third)
to:      level 2 (beta-second)
  create  sglang/srt/old.py
  change  sglang/srt/research/receipt.json
  change  sglang-0.5.19.dist-info/RECORD
  remove  sglang/srt/layers/deep/er/notes.txt
done: level 2 (beta-second); restart what runs from this tree
[0]
$ apply.py revert --root tree --to gamma-third
target:  /where/tree
version: 0.5.19
torch:   not seen
error: the tree is not in the state that was asked for [not-expected]
  where:    /where/tree
  expected: a tree at or above gamma-third
  found:    level 2 (beta-second)
  next:     run: tools/apply.py apply --to gamma-third --root /where/tree
[1]

# Somebody edited a patched file: nothing is taken off.
$ echo 'edited = 1' >> tree/sglang/srt/layers/pool.py
$ apply.py revert --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
error: the tree is at no level that the lock knows [drift]
  where:    /where/tree/sglang/srt/layers/pool.py (drifted; nearest known state: level 2 (beta-second))
  expected: sha256 HASH…, 128 bytes, mode 100644
  found:    larger than what may be there, 139 bytes, mode 100644
  next:     undo the change, or reinstall the base; every file: tools/apply.py status --root /where/tree
[1]
$ sed -i '$d' tree/sglang/srt/layers/pool.py
$ apply.py revert --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 2 (beta-second)
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
$ find tree -name research
