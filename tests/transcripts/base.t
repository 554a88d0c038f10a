# An image that differs from the release in a declared file is a base of its own.
$ sed -i 's/engine = 20$/engine = 2020/' tree/sglang/srt/engine.py
$ apply.py base add --offline --from tree --id image-1 --overlay sglang/srt/engine.py -n
would add: image-1 (prefill), as 0.5.19 but for:
  sglang/srt/engine.py  sha256 HASH…, 473 bytes, mode 100644
[0]
$ apply.py base add --offline --from tree --id image-1 --overlay sglang/srt/engine.py
added: image-1 (prefill), as 0.5.19 but for:
  sglang/srt/engine.py  sha256 HASH…, 473 bytes, mode 100644
[0]
$ apply.py apply --root tree --to alpha-first
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    image-1 (prefill)
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
$ apply.py revert --root tree > /dev/null

# What was not declared is refused, and so is a change inside a hunk.
$ echo 'more = 1' >> tree/sglang/_version.py
$ apply.py base add --offline --from tree --id image-2 --overlay sglang/srt/engine.py
error: the tree is not the pinned release [not-attested]
  where:    /where/tree
  expected: every file of sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl but the declared ones
  found:    1 differ: sglang/_version.py
  next:     declare each with --overlay FILE, or put it back
[1]
$ sed -i 's/engine = 31$/engine = 3131/' tree/sglang/srt/engine.py
$ apply.py base add --offline --from tree --id image-2 --overlay sglang/srt/engine.py --overlay sglang/_version.py
error: the file does not have the lines that the hunk expects [context-differs]
  where:    image-2: the hunk at patches/prefill/alpha-first.patch:20: sglang/srt/engine.py
  expected: line 31: engine = 31\n
  found:    engine = 3131\n
  next:     the image and this patch change the same lines: bring the patch to the image's file, or use an image without that change
[1]
