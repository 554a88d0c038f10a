# An author edits a tree at the second patch and writes the patch back.
$ apply.py apply --to beta-second --root tree > /dev/null
$ apply.py refresh beta-second --from tree
nothing to do: the patch gives this tree
[3]
$ sed -i 's/^pool = 3$/pool = three/' tree/sglang/srt/layers/pool.py
$ apply.py refresh beta-second --from tree --dry-run
would write: patches/prefill/beta-second.patch
next: tools/apply.py pin
[0]
$ apply.py refresh beta-second --from tree
written: patches/prefill/beta-second.patch
next: tools/apply.py pin
[0]
$ apply.py pin --offline
changed: patches/pins.lock, bundle HASH
[0]
$ apply.py status --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
level:   drifted; nearest is 2 of 3 (beta-second)
receipt: other
  patched at step 2   sglang/srt/engine.py
  patched at step 2   sglang/srt/launch.sh
  absent              sglang/srt/layers/deep/er/notes.txt
  patched at step 2   sglang/srt/layers/pool.py
  patched at step 2   sglang/srt/layers/wired.py
  base                sglang/srt/old.py
  patched at step 1   sglang/srt/research/__init__.py
  patched at step 1   sglang/srt/research/alpha.py
  patched at step 1   sglang/srt/research/gates.py
  patched at step 2   sglang/srt/research/kernels/beta.cu
  drifted             sglang-0.5.19.dist-info/RECORD: sglang/srt/layers/pool.py
[1]

# A new file of ours is written to sources; the series is the author's to edit.
$ echo 'x = 1' > tree/sglang/srt/research/delta.py
$ apply.py refresh beta-second --from tree
written: sources/prefill/delta.py
not in the series yet: prefill/delta.py; add it to the sources of beta-second
next: tools/apply.py pin
[0]

# The tree has a later patch on it.
$ rm bundle/sources/prefill/delta.py tree/sglang/srt/research/delta.py
$ apply.py refresh alpha-first --from tree
error: the tree is not in the state that was asked for [not-expected]
  where:    /where/tree/sglang/srt/research/kernels/beta.cu
  expected: a tree at alpha-first
  found:    a file of a later patch
  next:     run: tools/apply.py revert --to alpha-first --root /where/tree, then edit
[1]
