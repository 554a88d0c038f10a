"""Command lines and environments of the engines and of the router."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.rig import cache, faults, refuser, standins
from lab.rig.errors import RigError
from lab.rig.member import Spec
from lab.rig.ports import HOST
from lab.rig.tree import REPOSITORY, Tree

READY = "The server is fired up and ready to roll!"
# Without a warm-up the line above comes before the socket listens.
LISTENS = "Uvicorn running on"
IMPORTED = "rig: tree"
# Imported in every engine process, in this order.
HOOKS = ("lab.rig.observe", "lab.rig.levers", "lab.rig.forks")
# What the harness adds to the stand-ins' own list; each line says why.
ENVIRONMENT: dict[str, str] = {
    "TRANSFORMERS_OFFLINE": "1",  # nothing is downloaded
    "MKL_CBWR": "COMPATIBLE",  # the same sums whatever the alignment of a buffer
    "SGLANG_HOST_IP": HOST,  # where transfer and bootstrap listen; the default is the machine's own address
    # A prefill whose cores are all at work answers late: a member that died is seen by the keeper, not by its pulse.
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1000",
    "no_proxy": HOST,
    "PYTHONUNBUFFERED": "1",
    "PATCHBUNDLE_RIG_LEASH": "1",  # every process of an engine ends with its parent
}
MODEL_FILES = ("deepseek_v2", "deepseek_nextn", "glm4_moe", "glm4_moe_nextn")
# Names that must not reach an engine from the caller's shell: they change what runs.
_DROP = ("SGLANG_", "SMG_", "PYTHON", "TRITON_", "TORCH", "MC_", "PATCHBUNDLE_RIG_", "OMP_", "CUDA_")
DSA_FLAGS = (
    "--attention-backend=dsa",
    "--dsa-prefill-backend=flashmla_sparse",
    "--dsa-decode-backend=flashmla_sparse",
    "--dsa-topk-backend=torch",
    "--kv-cache-dtype=bfloat16",
)
MLA_FLAGS = ("--attention-backend=fa3",)
# The backend that splits MLA over decode context parallel ranks; its ragged kernel is not stood in for.
MLA_DCP_FLAGS = ("--attention-backend=flashinfer", "--flashinfer-mla-disable-ragged")


@dataclass(frozen=True)
class Engine:
    """One engine of a deployment.

    Attributes:
        name: its name in the deployment.
        role: ``prefill`` or ``decode``; decides the release and the environment.
        mode: ``prefill`` or ``decode`` of a disaggregated pair, or ``alone`` for one process that does both.
        tree: what it runs.
        python: the interpreter of the environment for its release.
        model: folder of the tiny model.
        flags: launch flags beyond the common ones.
        env: gates and switches beyond the common ones.
        tp: tensor parallel ranks, as many processes.
    """

    name: str
    role: str
    mode: str
    tree: Tree
    python: Path
    model: Path
    port: int
    bootstrap: int
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tp: int = 1
    dtype: str = "float32"
    tokens: int = 4096


def clean_environment() -> dict[str, str]:
    """The caller's environment without the names that would change what an engine does."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_DROP)}


def other_models(tree: Tree) -> str:
    """Names of the model files of ``tree`` that the rig never runs, for the engine's own switch that skips them.

    Every rank imports all of them otherwise, which is most of an engine's start on a CPU.
    """
    names = {path.stem for path in (tree.root / "sglang" / "srt" / "models").glob("*.py")}
    return ",".join(sorted(names - set(MODEL_FILES)))


def family(model: Path) -> str:
    """``dsa`` or ``mla``, by the model's own configuration.

    Raises:
        RigError: kind ``model``; it is neither.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if "index_topk" in config:
        return "dsa"
    if "kv_lora_rank" in config:
        return "mla"
    raise RigError("model", f"{model}: neither MLA nor DSA")


def python_path(*folders: Path) -> str:
    """Folders joined for PYTHONPATH."""
    return os.pathsep.join(str(folder) for folder in folders)


def engine_spec(engine: Engine, folder: Path, hooks: Sequence[str] = HOOKS) -> Spec:
    """The member that starts ``engine``; ``folder`` is the deployment's own, for temporary files.

    The tree comes first on PYTHONPATH, so it wins over the release installed in the environment, and the observer ends
    the process if a single module of the engine came from elsewhere.
    """
    if engine.env.get(faults.VARIABLE):
        hooks = (*hooks, faults.HOOK)
    env = {
        **clean_environment(),
        **standins.environment(engine.tree.version),
        **ENVIRONMENT,
        "PYTHONPATH": python_path(engine.tree.root, standins.SITE, REPOSITORY),
        # Bytecode goes to the cache: a tree is run as it stands and is left as it stood.
        "PYTHONPYCACHEPREFIX": str(cache.root() / "bytecode" / engine.tree.version),
        "TMPDIR": str(folder / "tmp"),
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(engine.tp)),
        "SGLANG_DISABLED_MODEL_ARCHS": other_models(engine.tree),
        "PATCHBUNDLE_RIG_HOOKS": ",".join(hooks),
        "PATCHBUNDLE_RIG_TREE": str(engine.tree.root),
        **engine.env,
    }
    argv = [
        str(engine.python),
        "-m",
        "sglang.launch_server",
        f"--model-path={engine.model}",
        "--load-format=auto",
        "--device=cpu",
        "--sampling-backend=pytorch",
        f"--host={HOST}",
        f"--port={engine.port}",
        f"--dtype={engine.dtype}",
        f"--max-total-tokens={engine.tokens}",
        f"--tp-size={engine.tp}",
        "--page-size=64",
        "--random-seed=0",
        "--disable-cuda-graph",
        "--skip-server-warmup",
        # The engine's own. Without it each idle rank turns its loop at full speed, and six of them starve the busy one.
        "--sleep-on-idle",
    ]
    if family(engine.model) == "dsa":
        argv += DSA_FLAGS
    else:
        argv += MLA_DCP_FLAGS if any(flag.startswith("--dcp-size") for flag in engine.flags) else MLA_FLAGS
    if engine.mode != "alone":
        argv += [
            f"--disaggregation-mode={engine.mode}",
            "--disaggregation-transfer-backend=mooncake_tcp",
            f"--disaggregation-bootstrap-port={engine.bootstrap}",
        ]
    argv += engine.flags
    return Spec(
        name=engine.name,
        argv=tuple(argv),
        env=env,
        ready=(READY, LISTENS, IMPORTED),
        role=engine.mode,
        port=engine.port,
        tree=str(engine.tree.root),
    )


def need_router(build: str) -> None:
    """Refuse what cannot be a router; see ``router_package``.

    Raises:
        RigError: kind ``router``.
    """
    path = Path(build).resolve()
    package = (path / "sglang_router" / "__init__.py").is_file()
    if build not in ("wheel", "stock", "patched") and not package and not (path.is_file() and path.suffix == ".so"):
        raise RigError(
            "router", f"{build} is neither 'wheel', nor a folder with sglang_router/, nor a compiled library"
        )


def router_package(build: str, folder: Path, python: Path) -> Path | None:
    """The folder to put on PYTHONPATH for the router ``build``; ``None`` for the published wheel's.

    Args:
        build: ``wheel``; ``stock`` or ``patched`` for one that is built from this repository, now if it is not in the
            cache; a folder that holds a ``sglang_router`` package; or the compiled library alone, which is then laid
            over a copy of the published package in ``folder``.

    Raises:
        RigError: kind ``router``; there is nothing of the kind, or it cannot be built.
    """
    need_router(build)
    if build == "wheel":
        return None
    if build in ("stock", "patched"):
        # Only here: an engine is also started where no bundle is read.
        from lab.router.build import Builder, BuildError
        from patchbundle.errors import BundleError

        try:
            return Builder().build(build).folder
        except (BuildError, BundleError) as error:
            raise RigError("router", str(error)) from error
    path = Path(build).resolve()
    if (path / "sglang_router" / "__init__.py").is_file():
        return path
    stock = next(iter(python.parent.parent.glob("lib/python3*/site-packages/sglang_router")), None)
    if stock is None:
        raise RigError("router", f"{python.parent.parent} holds no sglang_router package")
    package = folder / "router" / "sglang_router"
    package.mkdir(parents=True)
    for source in stock.glob("*.py"):
        (package / source.name).write_bytes(source.read_bytes())
    (package / "sglang_router_rs.abi3.so").write_bytes(path.read_bytes())
    return package.parent


def refuser_spec(name: str, port: int, engine: Engine, status: int, seconds: float) -> Spec:
    """The member that stands in front of ``engine`` and refuses its requests, see ``lab.rig.refuser``."""
    argv = [sys.executable, "-m", "lab.rig.refuser", *(str(word) for word in (port, engine.port, status, seconds))]
    env = {**clean_environment(), "PYTHONPATH": str(REPOSITORY)}
    return Spec(name, tuple(argv), env, (refuser.READY,), "refuser", port, (engine.name,))


def router_spec(
    name: str,
    python: Path,
    port: int,
    metrics_port: int,
    prefills: Sequence[Engine],
    decodes: Sequence[Engine],
    package: Path | None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Spec:
    """The member that starts the router in front of ``prefills`` and ``decodes``, once they are ready."""
    argv = [str(python), "-m", "sglang_router.launch_router", f"--host={HOST}", f"--port={port}"]
    argv += ["--pd-disaggregation", f"--prometheus-port={metrics_port}", f"--prometheus-host={HOST}"]
    for engine in prefills:
        argv += ["--prefill", f"http://{HOST}:{engine.port}", str(engine.bootstrap)]
    for engine in decodes:
        argv += ["--decode", f"http://{HOST}:{engine.port}"]
    if not any(flag.startswith("--policy") for flag in flags):
        argv += ["--policy=round_robin"]
    argv += flags
    variables = {**clean_environment(), "NO_PROXY": HOST, "no_proxy": HOST, "HF_HUB_OFFLINE": "1", **(env or {})}
    if package is not None:
        variables["PYTHONPATH"] = str(package)
    return Spec(
        name=name,
        argv=tuple(argv),
        env=variables,
        ready=(),
        role="router",
        port=port,
        after=tuple(engine.name for engine in (*prefills, *decodes)),
    )
