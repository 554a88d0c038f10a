# neither a layout nor an archive
$ apply.py image --from nowhere --to out --role prefill
error: the image is not sound, or not the one that was asked for [image]
  where:    nowhere
  expected: an OCI layout, or an archive that docker saved
  found:    neither
  next:     name another image, or copy it again from where it came
[1]

# no layout
$ mkdir empty
$ apply.py image --from empty --to out --role prefill
error: the image is not sound, or not the one that was asked for [image]
  where:    empty
  expected: index.json of an OCI layout, or manifest.json of docker's
  found:    neither
  next:     name another image, or copy it again from where it came
[1]

# a role must be named
$ apply.py image --from empty --to out
Usage: apply.py image [OPTIONS]
Try 'apply.py image --help' for help.

Error: Missing option '--role'. Choose from:
	prefill,
	decode,
	router
[2]
