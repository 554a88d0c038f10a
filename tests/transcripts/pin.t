$ apply.py pin --offline
unchanged: patches/pins.lock, bundle HASH
[3]
$ echo '# more' >> bundle/sources/prefill/alpha.py
$ apply.py apply --root tree
error: a file of the bundle is not as locked [artifact]
  where:    sources/prefill/alpha.py
  expected: HASH
  found:    HASH
  next:     undo the edit; if it was meant, run: tools/apply.py pin
[1]
$ apply.py pin --offline --check
changed: patches/pins.lock, bundle HASH
[1]
$ apply.py pin --offline
changed: patches/pins.lock, bundle HASH
[0]
$ apply.py pin --offline --check
unchanged: patches/pins.lock, bundle HASH
[3]

# A diff that does not fit the release.
$ sed -i 's/^ engine = 4$/ engine = 44/' bundle/patches/prefill/alpha-first.patch
$ apply.py pin --offline
error: the file does not have the lines that the hunk expects [context-differs]
  where:    patches/prefill/alpha-first.patch:12: sglang/srt/engine.py
  expected: line 4: engine = 44\n
  found:    engine = 4\n
  next:     mend the bundle, then run: tools/check_sources.py
[1]

# A diff that lost its last lines.
$ sed -i '$d' bundle/patches/prefill/alpha-first.patch
$ apply.py pin --offline
error: a hunk does not have as many lines as its header says [hunk-count]
  where:    patches/prefill/alpha-first.patch:20
  expected: Hunk is shorter than expected
  found:    @@ -27,7 +28,7 @@
  next:     mend the bundle, then run: tools/check_sources.py
[1]
