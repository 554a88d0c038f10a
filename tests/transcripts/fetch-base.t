$ apply.py fetch-base --offline
HASH  /where/cache/archives/HASH/sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl
[0]
$ apply.py fetch-base --offline --archive other.whl
error: an archive is not the pinned one [archive]
  where:    other.whl
  expected: an archive of config/bases.toml
  found:    none
  next:     see config/bases.toml, then run: tools/apply.py fetch-base
[1]

# Something else lies in the cache under the archive's name.
$ echo x | tee cache/archives/*/*.whl
x
[0]
$ apply.py fetch-base --offline
error: an archive is not the pinned one [archive]
  where:    /where/cache/archives/HASH/sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl
  expected: HASH
  found:    HASH
  next:     delete this file, then fetch again
[1]
$ rm cache/archives/*/*.whl
$ apply.py fetch-base --offline
error: an archive is not in the cache and could not be fetched [not-fetched]
  where:    /where/cache/archives/HASH/sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl
  expected: the archive in the cache
  found:    nothing
  next:     run: tools/apply.py fetch-base, with a network
[6]
