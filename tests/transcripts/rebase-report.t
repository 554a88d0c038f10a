# The release that the series was made for.
$ cp cache/archives/*/*.whl sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl
$ apply.py rebase-report --role prefill --archive sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl
release: sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl
  fits      alpha-first  sglang/srt/research/__init__.py
  fits      alpha-first  sglang/srt/research/gates.py
  fits      alpha-first  sglang/srt/research/alpha.py
  fits      alpha-first  sglang/srt/engine.py:12
  fits      alpha-first  sglang/srt/engine.py:20
  fits      beta-second  sglang/srt/research/kernels/beta.cu
  fits      beta-second  sglang/srt/engine.py:12
  fits      beta-second  sglang/srt/layers/pool.py:26
  fits      beta-second  sglang/srt/layers/wired.py:31
  fits      gamma-third  sglang/srt/layers/deep/er/notes.txt:9
  fits      gamma-third  sglang/srt/old.py:20
[0]

# Another one, in which a file has grown at its head and another is gone.
$ python3 -m zipfile -e sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl other
$ sed -i '1i # new' other/sglang/srt/engine.py
$ rm other/sglang/srt/old.py
$ cd other && python3 -m zipfile -c ../other.whl sglang
$ apply.py rebase-report --role prefill --archive other.whl
release: other.whl
  fits      alpha-first  sglang/srt/research/__init__.py
  fits      alpha-first  sglang/srt/research/gates.py
  fits      alpha-first  sglang/srt/research/alpha.py
  moved     alpha-first  sglang/srt/engine.py:12  (+1 lines)
  moved     alpha-first  sglang/srt/engine.py:20  (+1 lines)
  fits      beta-second  sglang/srt/research/kernels/beta.cu
  moved     beta-second  sglang/srt/engine.py:12  (+1 lines)
  fits      beta-second  sglang/srt/layers/pool.py:26
  fits      beta-second  sglang/srt/layers/wired.py:31
  fits      gamma-third  sglang/srt/layers/deep/er/notes.txt:9
  gone      gamma-third  sglang/srt/old.py:16
[1]
$ apply.py rebase-report --role prefill --archive other.whl --release 0.5.18
Usage: apply.py rebase-report [OPTIONS]
Try 'apply.py rebase-report --help' for help.

Error: give --release or --archive, not both
[2]
