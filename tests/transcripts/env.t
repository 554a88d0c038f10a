# a bundle without the file of the role; names that are none
$ apply.py env prefill
error: the manifest is not valid [manifest]
  where:    /where/bundle/config/prefill.toml
  expected: the file
  found:    No such file or directory
  next:     mend the bundle, then run: tools/check_sources.py
[1]
$ apply.py env prefill --profile ../other
error: this combination of gates and arguments would not start [launch]
  where:    profile ../other
  expected: small letters, digits and dashes
  next:     switch the gate off with --off, or change what it needs
[1]
$ apply.py env nobody
Usage: apply.py env [OPTIONS] {prefill|decode|router}
Try 'apply.py env --help' for help.

Error: Invalid value for '{prefill|decode|router}': 'nobody' is not one of 'prefill', 'decode', 'router'.
[2]
