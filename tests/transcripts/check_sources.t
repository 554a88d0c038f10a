$ check_sources.py
bundle:  HASH, 3 patches, 10 files scanned
[0]
$ check_sources.py --root tree
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
holds:   sglang-0.5.19 at level 0 (base)
[0]
$ check_sources.py --root tree --expect base --full
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
holds:   sglang-0.5.19 at level 0 (base)
release: 10 files as in sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl, 0 extra
[0]
$ check_sources.py --root tree --expect applied
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
error: the tree is not in the state that was asked for [not-expected]
  where:    /where/tree
  expected: gamma-third (applied)
  found:    level 0 (base)
  next:     run: tools/apply.py apply --root /where/tree
[1]
$ apply.py apply --root tree > /dev/null
$ touch tree/sglang/theirs.py
$ check_sources.py --root tree --expect applied --full -v
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
holds:   sglang-0.5.19 at level 3 (gamma-third)
release: 10 files as in sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl, 1 extra
  extra sglang/theirs.py
[0]
$ check_sources.py --root tree --expect base
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
error: the tree is not in the state that was asked for [not-expected]
  where:    /where/tree
  expected: base
  found:    level 3 (gamma-third)
  next:     run: tools/apply.py revert --root /where/tree
[1]
$ check_sources.py --expect base
bundle:  HASH, 3 patches, 10 files scanned
Usage: check_sources.py [OPTIONS]
Try 'check_sources.py --help' for help.

Error: --expect, --full, --bytecode, --role and --require-torch need --root or --python
[2]

# A file of the release that no patch touches.
$ echo x >> tree/sglang/srt/tool.sh
$ check_sources.py --root tree
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
holds:   sglang-0.5.19 at level 3 (gamma-third)
[0]
$ check_sources.py --root tree --full
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
error: the tree is not the pinned release [not-attested]
  where:    /where/tree
  expected: 10 files of sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl
  found:    1 differ: sglang/srt/tool.sh
  next:     reinstall the distribution
[1]
$ rm tree/sglang-0.5.19.dist-info/RECORD
$ check_sources.py --root tree --full
bundle:  HASH, 3 patches, 9 files as the lock says
target:  /where/tree
version: 0.5.19
torch:   not seen
warning: RECORD: not seen, so it is not kept up; if it comes back, the tree is drifted
error: the tree is not the pinned release [not-attested]
  where:    /where/tree
  expected: the distribution's RECORD
  found:    none
  next:     reinstall the distribution; without its RECORD only pinned files can be checked
[1]

# The bundle itself.
$ echo x >> bundle/sources/prefill/alpha.py
$ check_sources.py
error: a file of the bundle is not as locked [artifact]
  where:    sources/prefill/alpha.py
  expected: HASH
  found:    HASH
  next:     undo the edit; if it was meant, run: tools/apply.py pin
[1]
$ sed -i '$d' bundle/sources/prefill/alpha.py
$ touch bundle/patches/prefill/forgotten.patch
$ check_sources.py
error: the bundle holds a file that nothing names [orphan]
  where:    patches/prefill/forgotten.patch
  found:    a file of no patch
  next:     name it in patches/series.toml, or delete it
[1]
$ rm bundle/patches/prefill/forgotten.patch
$ printf '\177ELF' > bundle/kernel.so
$ check_sources.py
error: the bundle holds something that must not be published [scan]
  where:    kernel.so:1: binary: an ELF file
  expected: no address, host, account, token, key, private path or binary
  found:    1 finding(s)
  next:     take it out; history that holds a credential needs the credential revoked
[1]
