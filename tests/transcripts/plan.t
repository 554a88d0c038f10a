$ apply.py plan --root tree --to alpha-first
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
[0]
$ apply.py plan --root tree --to alpha-first --json
{
 "error": null,
 "exit": 0,
 "result": {
  "plan": {
   "base": "sglang-0.5.19",
   "from": "base",
   "gone_folders": [],
   "new_folders": [
    "sglang/srt/research"
   ],
   "operations": [
    {
     "new": "100644 HASH 12",
     "old": "absent",
     "path": "sglang/srt/research/__init__.py",
     "verb": "create"
    },
    {
     "new": "100644 HASH 33",
     "old": "absent",
     "path": "sglang/srt/research/alpha.py",
     "verb": "create"
    },
    {
     "new": "100644 HASH 36",
     "old": "absent",
     "path": "sglang/srt/research/gates.py",
     "verb": "create"
    },
    {
     "new": "100644 HASH 189",
     "old": "absent",
     "path": "sglang/srt/research/receipt.json",
     "verb": "create"
    },
    {
     "new": "100644 HASH 486",
     "old": "100644 HASH 471",
     "path": "sglang/srt/engine.py",
     "verb": "change"
    },
    {
     "new": "100644 HASH 1435",
     "old": "100644 HASH 1095",
     "path": "sglang-0.5.19.dist-info/RECORD",
     "verb": "change"
    }
   ],
   "to": "alpha-first"
  },
  "target": {
   "root": "/where/tree",
   "torch": null,
   "version": "0.5.19"
  },
  "warnings": []
 },
 "schema": 1,
 "tool": "0.2.0",
 "verb": "plan"
}
[0]
$ apply.py plan --root tree --revert
target:  /where/tree
version: 0.5.19
torch:   not seen
base:    sglang-0.5.19 (prefill)
from:    level 0 (base)
to:      level 0 (base)
nothing to do
[3]
$ apply.py plan --root tree/sglang
error: no target was found [no-target]
  where:    tree/sglang
  expected: a folder that holds sglang/, or the router's crate
  found:    neither
  next:     give --root DIR or --python EXE
[1]
$ sed -i s/0.5.19/0.5.18/ tree/sglang-0.5.19.dist-info/METADATA
$ apply.py plan --root tree
error: the target is another version than every pinned base [wrong-version]
  where:    /where/tree
  expected: sglang 0.5.19 (prefill)
  found:    sglang 0.5.18
  next:     point --root or --python at the fixed image's own engine
[1]
