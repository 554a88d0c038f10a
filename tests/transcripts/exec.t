# Only from a tree at the expected level. What is started takes the place of the tool: here nothing is.
$ apply.py exec prefill --root tree --expect base -n
holds:   base
[0]
$ apply.py exec prefill --root tree --expect applied -- engine --port 30000
error: the tree is not in the state that was asked for [not-expected]
  where:    /where/tree
  expected: gamma-third (applied)
  found:    level 0 (base)
  next:     run: tools/apply.py apply --root /where/tree
[1]
$ apply.py exec prefill --root tree --expect delta -- engine
error: no such patch in this series [unknown-level]
  where:    delta
  expected: base or one of alpha-first, beta-second, gamma-third
  next:     run: tools/apply.py status --json, which lists the levels
[1]
$ apply.py exec prefill --root tree --expect base -- no-such-engine
error: the command cannot be started [no-command]
  where:    no-such-engine
  expected: a program
  found:    none that may be started
  next:     name a program that this user may start
[1]
$ apply.py exec prefill --root tree --expect base
Usage: apply.py exec [OPTIONS] {prefill|decode|router} -- CMD...
Try 'apply.py exec --help' for help.

Error: name the command after --
[2]

# A run was interrupted.
$ touch tree/.patchbundle-journal
$ apply.py exec prefill --root tree --expect base -- engine
error: an earlier run was interrupted [recovery-needed]
  where:    /where/tree
  next:     run: tools/apply.py recover --root /where/tree
[4]
