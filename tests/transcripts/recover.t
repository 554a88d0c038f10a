$ apply.py recover --root tree
nothing to do
[3]
$ apply.py recover --root tree --dry-run
nothing to do
[3]

# Killed as it wrote its first journal.
$ touch tree/.patchbundle-journal.new
$ apply.py apply --root tree
target:  /where/tree
version: 0.5.19
torch:   not seen
error: an earlier run was interrupted [recovery-needed]
  where:    /where/tree
  next:     run: tools/apply.py recover --root /where/tree
[4]
$ apply.py recover --root tree --dry-run
interrupted at its start
[0]
$ apply.py recover --root tree
recovered: nothing had been changed
[0]

# A journal that nobody wrote.
$ echo '{}' > tree/.patchbundle-journal
$ apply.py recover --root tree
error: the journal of an interrupted run is damaged [journal]
  where:    /where/tree/.patchbundle-journal
  expected: the journal as it was written
  found:    3 other bytes
  next:     do not delete it: see docs/recovery.md, 'A damaged journal'
[4]
$ apply.py recover
Usage: apply.py recover [OPTIONS]
Try 'apply.py recover --help' for help.

Error: Missing option '--root'.
[2]
