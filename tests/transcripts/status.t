# A release as it was published.
$ apply.py status --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
level:   0 of 3 (base)
receipt: none
  base                sglang/srt/engine.py
  base                sglang/srt/launch.sh
  absent              sglang/srt/layers/deep/er/notes.txt
  base                sglang/srt/layers/pool.py
  absent              sglang/srt/layers/wired.py
  base                sglang/srt/old.py
  absent              sglang/srt/research/__init__.py
  absent              sglang/srt/research/alpha.py
  absent              sglang/srt/research/gates.py
  absent              sglang/srt/research/kernels/beta.cu
[0]
$ apply.py apply --root tree --to beta-second > /dev/null
$ apply.py status --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
level:   2 of 3 (beta-second)
receipt: current
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
[0]

# A tree that somebody changed: every file has its word.
$ echo 'edited = 1' >> tree/sglang/srt/engine.py
$ rm tree/sglang/srt/layers/pool.py
$ chmod -x tree/sglang/srt/launch.sh
$ rm tree/sglang/srt/research/gates.py && mkdir tree/sglang/srt/research/gates.py
$ touch tree/sglang/srt/research/extra.py
$ apply.py status --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
level:   drifted; nearest is 2 of 3 (beta-second)
receipt: current
  drifted             sglang/srt/engine.py
  wrong mode          sglang/srt/launch.sh
  absent              sglang/srt/layers/deep/er/notes.txt
  missing             sglang/srt/layers/pool.py
  patched at step 2   sglang/srt/layers/wired.py
  base                sglang/srt/old.py
  patched at step 1   sglang/srt/research/__init__.py
  patched at step 1   sglang/srt/research/alpha.py
  wrong kind          sglang/srt/research/gates.py
  patched at step 2   sglang/srt/research/kernels/beta.cu
  unexpected          sglang/srt/research/extra.py
[1]
$ apply.py status --root tree --diff
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
level:   drifted; nearest is 2 of 3 (beta-second)
receipt: current
  drifted             sglang/srt/engine.py
  wrong mode          sglang/srt/launch.sh
  absent              sglang/srt/layers/deep/er/notes.txt
  missing             sglang/srt/layers/pool.py
  patched at step 2   sglang/srt/layers/wired.py
  base                sglang/srt/old.py
  patched at step 1   sglang/srt/research/__init__.py
  patched at step 1   sglang/srt/research/alpha.py
  wrong kind          sglang/srt/research/gates.py
  patched at step 2   sglang/srt/research/kernels/beta.cu
  unexpected          sglang/srt/research/extra.py
differences from level 2 of 3 (beta-second): 5

diff --git a/sglang/srt/engine.py b/sglang/srt/engine.py
--- a/sglang/srt/engine.py
+++ b/sglang/srt/engine.py
@@ -40,3 +40,4 @@ engine = 37
 engine = 38
 engine = 39
 engine = 40
+edited = 1

diff --git a/sglang/srt/launch.sh b/sglang/srt/launch.sh
old mode 100755
new mode 100644

diff --git a/sglang/srt/layers/pool.py b/sglang/srt/layers/pool.py
deleted file mode 100644
--- a/sglang/srt/layers/pool.py
+++ /dev/null
@@ -1,13 +0,0 @@
-pool = 1
-pool = 2
-pool = 3
-pool = 4
-pool = 5
-pool = 6
-pool = 7
-pool = 8
-pool = 9
-pool = 10
-pool = 11
-pool = 12
-pool = beta.pool

sglang/srt/research/gates.py: a folder stands there

diff --git a/sglang/srt/research/extra.py b/sglang/srt/research/extra.py
new file mode 100644
[1]
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

# A run was interrupted.
$ touch tree/.patchbundle-journal
$ apply.py status --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
error: an earlier run was interrupted [recovery-needed]
  where:    /where/tree
  next:     run: tools/apply.py recover --root /where/tree
[4]
