"""CPU stand-ins for GPU kernels, so that the real SGLang engines run on a machine without a GPU.

What is stood in for is kernels, calls of the CUDA runtime and a few checks, all listed in
:data:`lab.rig.standins.table.TABLE`. Schedulers, attention backends, the indexer, the top-k funnel, pools,
allocators, communicators, transfer and speculative workers are the engine's own. Triton kernels are the engine's
own too, in Triton's interpreter.

How to start an engine with them. Put on PYTHONPATH, in this order: the engine tree if it is not the installed one,
then :data:`SITE`, the folder that holds ``sitecustomize.py``. Add the variables of :func:`environment`. Python then
loads the stand-ins in every process before the engine's first line, checks them, and ends the process with exit
code 70 and a named error if a target moved, if the version is unknown or if it is not the announced one.

Variables read from the environment:

* ``PATCHBUNDLE_RIG_ENGINE``: the announced engine version; set by :func:`environment`.
* ``PATCHBUNDLE_RIG_LEASH=1``: the process is killed when its parent ends (Linux), also on ``kill -9``.
* ``PATCHBUNDLE_RIG_HOOKS``: modules to import after the stand-ins, comma separated; they may register functions
  with :func:`lab.rig.standins.hook.after`.

Flags that go with them, in both versions: ``--device cpu --sampling-backend pytorch --disable-cuda-graph
--skip-server-warmup``, and

* dense models (MHA or MLA), with and without speculation: ``--attention-backend fa3``;
* MLA under decode context parallelism: ``--attention-backend flashinfer --flashinfer-mla-disable-ragged``;
* sparse attention (GLM-DSA): ``--attention-backend dsa --page-size 64`` with ``--dsa-prefill-backend`` and
  ``--dsa-decode-backend`` both ``flashmla_sparse`` (``--kv-cache-dtype bfloat16``) or both ``flashmla_kv``
  (``--kv-cache-dtype fp8_e4m3``, 656-byte rows).

Not seen here: CUDA graphs, races between streams, NCCL, RDMA, the arithmetic of the real kernels, speed.
"""

from __future__ import annotations

from pathlib import Path

from lab.rig.standins.errors import UnknownVersion
from lab.rig.standins.table import VERSIONS

__all__ = ["SITE", "environment"]

SITE = Path(__file__).resolve().parent / "site"


def environment(version: str) -> dict[str, str]:
    """Variables that an engine of this version needs to run on the stand-ins.

    Args:
        version: ``0.5.17`` or ``0.5.19``.

    Raises:
        UnknownVersion: any other version.
    """
    if version not in VERSIONS:
        raise UnknownVersion(f"no stand-ins for sglang {version}; known: {', '.join(VERSIONS)}")
    return {
        "PATCHBUNDLE_RIG_ENGINE": version,
        # The engine's own switch for a CPU.
        "SGLANG_USE_CPU_ENGINE": "1",
        # A GPU that happens to be there must not change what runs.
        "CUDA_VISIBLE_DEVICES": "",
        # Triton kernels run on CPU tensors in Triton's interpreter; nothing is compiled.
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # The fused indexer and the fused top-k are CUDA sources compiled at run time; the unfused paths run.
        "SGLANG_DISABLE_DSA_INDEXER_FUSION": "1",
        "SGLANG_DSA_FUSE_TOPK": "0",
        "SGLANG_OPT_USE_TOPK_V2": "0",
        # Real transfers over TCP on one host.
        "MC_FORCE_TCP": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
