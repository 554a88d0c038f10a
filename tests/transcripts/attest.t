# of the bundle; what stands at the output is kept
$ apply.py attest --out out
written: out/pins.lock
written: out/prefill.cdx.json
written: out/prefill.intoto.json
[0]
$ apply.py attest --out out
error: the place for the output is not free [output]
  where:    /where/out
  expected: nothing there yet
  found:    a file or folder
  next:     name another place, or move away what stands there
[1]

# of a tree, at its level
$ apply.py apply --root tree --to alpha-first > /dev/null
$ apply.py attest --out one --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
written: one/pins.lock
written: one/prefill.cdx.json
written: one/prefill.intoto.json
[0]
$ grep level one/prefill.intoto.json
   "level": 1,
[0]

# a role of which the bundle has no base
$ apply.py attest --out two --role decode
Usage: apply.py attest [OPTIONS]
Try 'apply.py attest --help' for help.

Error: this bundle has no base of role decode
[2]

# a key that is none
$ apply.py attest --out three --sign nowhere
error: a signature is missing or wrong, or could not be made [signature]
  where:    nowhere
  expected: a secret key of minisign
  found:    no file
  next:     name the secret key's file, and give its password
[1]
