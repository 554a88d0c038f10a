"""The import hook, the table, the check of targets and the check against our patches."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lab.rig.standins import (
    SITE,
    checks,
    cuda,
    environment,
    flash_attention,
    groups,
    hook,
    indexer,
    patches,
    staging,
    start,
    table,
    targets,
)
from lab.rig.standins.errors import StandInConflict, StandInMoved, UnknownVersion
from lab.rig.standins.table import StandIn

_HERE = Path(targets.__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path`` whose modules are forgotten afterwards, with the hook installed."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hook, "_HOOKS", {})
    monkeypatch.setattr(hook, "_EMPTY", set())
    monkeypatch.setattr(sys, "meta_path", [hook._FINDER, *sys.meta_path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


# The hook


def test_a_name_is_replaced_before_an_importer_binds_it(folder: Path) -> None:
    (folder / "lower.py").write_text("def f(x):\n    return 'stock'\n")
    (folder / "upper.py").write_text("from lower import f\n\nanswer = f(1)\n")
    hook.after("lower")(lambda module: setattr(module, "f", lambda x: "ours"))
    import upper  # type: ignore[import-not-found]

    assert upper.answer == "ours"


def test_functions_of_one_module_run_once_each_in_order(folder: Path) -> None:
    (folder / "counted.py").write_text("order = ['body']\n")
    hook.after("counted")(lambda module: module.order.append("first"))
    hook.after("counted")(lambda module: module.order.append("second"))
    import counted  # type: ignore[import-not-found]

    assert counted.order == ["body", "first", "second"]
    import counted as again

    assert again.order == ["body", "first", "second"]


def test_a_module_that_is_imported_already_is_not_missed(folder: Path) -> None:
    (folder / "early.py").write_text("value = 1\n")
    import early  # type: ignore[import-not-found]

    hook.after("early")(lambda module: setattr(module, "value", 2))
    assert early.value == 2


def test_a_submodule_of_a_package_is_hooked(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("from pack.part import value\n")
    (folder / "pack" / "part.py").write_text("value = 'stock'\n")
    hook.after("pack.part")(lambda module: setattr(module, "value", "ours"))
    import pack  # type: ignore[import-not-found]

    assert pack.value == "ours"
    assert pack.part.__spec__.loader.get_source("pack.part") == "value = 'stock'\n"


def test_an_error_of_a_hook_ends_the_import(folder: Path) -> None:
    (folder / "broken.py").write_text("value = 1\n")

    def fail(module: ModuleType) -> None:
        raise StandInMoved("gone")

    hook.after("broken")(fail)
    with pytest.raises(StandInMoved, match="gone"):
        import broken  # type: ignore[import-not-found]  # noqa: F401
    assert "broken" not in sys.modules


def test_a_module_without_hooks_is_left_to_the_other_finders(folder: Path) -> None:
    (folder / "plain.py").write_text("value = 1\n")
    import plain  # type: ignore[import-not-found]

    assert type(plain.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_library_that_needs_a_driver_is_answered_by_an_empty_module(folder: Path) -> None:
    (folder / "native.py").write_text("raise ImportError('libcuda.so.1')\n")
    hook.empty("native")
    import native  # type: ignore[import-not-found]

    assert not [name for name in vars(native) if not name.startswith("__")]


# One stand-in in one module


def _entry(**changes: Any) -> StandIn:
    base = StandIn("engine:is_ok", "checks:no_pdl", "replace", "check", "a", "b", "c")
    return replace(base, **changes)


def _module(text: str) -> ModuleType:
    module = ModuleType("engine")
    exec(compile(text, "engine.py", "exec"), vars(module))
    return module


def test_a_replacement_goes_in_only_with_the_same_parameters() -> None:
    module = _module("def is_ok():\n    return True\n")
    start.apply(_entry(), module)
    assert module.is_ok is checks.no_pdl
    with pytest.raises(StandInMoved, match=r"takes \['device'\]"):
        start.apply(_entry(), _module("def is_ok(device):\n    return True\n"))


def test_a_missing_target_is_an_error_that_names_it() -> None:
    with pytest.raises(StandInMoved, match="engine:is_ok is missing"):
        start.apply(_entry(), _module(""))
    with pytest.raises(StandInMoved, match=r"engine:Backend\.f: no Backend"):
        start.apply(_entry(target="engine:Backend.f"), _module(""))


def test_a_target_that_should_not_exist_here_is_an_error_if_it_does() -> None:
    entry = _entry(how="add", by="checks:the_cuda_forward", target="engine:Box.forward_native")
    module = _module("class Base:\n    def forward_native(self): ...\nclass Box(Base):\n    pass\n")
    start.apply(entry, module)
    assert vars(module.Box)["forward_native"] is checks.the_cuda_forward
    with pytest.raises(StandInMoved, match="exists"):
        start.apply(entry, module)


def test_a_wrapped_function_keeps_its_name_and_gets_the_original() -> None:
    module = _module("def build(self, size, device):\n    '''Doc.'''\n    self.made = (size, device)\n")
    start.apply(_entry(target="engine:build", by="staging:host_memory", how="wrap"), module)
    box = type("Box", (), {})()
    module.build(box, 5, device="cuda:0")
    assert box.made == (5, "cpu")
    assert module.build.__doc__ == "Doc."


# The table


def test_every_stand_in_is_one_of_ours_says_why_and_fits_a_known_version() -> None:
    for entry in table.TABLE:
        assert all((entry.replaces, entry.why, entry.maths)), entry.target
        assert set(entry.versions) <= set(table.VERSIONS)
        if entry.how == "empty":
            continue
        source, _, name = entry.by.partition(":")
        names = {label for label, _ in targets.definitions(ast.parse((_HERE / f"{source}.py").read_text()).body)}
        assert name in names, entry.by


def test_no_target_has_two_stand_ins_in_one_version() -> None:
    for version in table.VERSIONS:
        found = [entry.target for entry in table.for_version(version)]
        assert len(found) == len(set(found))


def test_no_backend_scheduler_pool_or_transfer_function_is_computed_by_us() -> None:
    """What decides stays the engine's: stand-ins in such modules answer checks or give memory, nothing more."""
    deciding = ("managers", "mem_cache", "disaggregation", "attention_registry", "dsa_backend", "speculative.eagle")
    for entry in table.TABLE:
        if entry.module.startswith("sglang.srt.") and any(word in entry.module for word in deciding):
            assert entry.kind in ("check", "device"), entry.target


def test_the_docs_table_has_a_line_for_every_stand_in_and_the_rows_are_json() -> None:
    lines = table.markdown({}).splitlines()
    assert len(lines) == len(table.TABLE) + 2
    assert {line.count(" | ") for line in lines if "\\|" not in line} == {lines[0].count(" | "), 0}
    assert len(json.loads(json.dumps(table.rows()))) == len(table.TABLE)


def test_torch_gets_a_different_object_under_every_name() -> None:
    """Its compiler refuses to start when one function stands under two names with different rules."""
    ours = [entry.by for entry in table.TABLE if entry.module == "torch"]
    assert len(ours) == len(set(ours))


# Versions and environment


@pytest.mark.parametrize("version", table.VERSIONS)
def test_the_environment_announces_the_version_and_only_holds_strings(version: str) -> None:
    variables = environment(version)
    assert variables["PATCHBUNDLE_RIG_ENGINE"] == version
    assert variables["TRITON_INTERPRET"] == "1"
    assert all(isinstance(value, str) for value in variables.values())
    assert (SITE / "sitecustomize.py").is_file()
    variables.clear()
    assert environment(version)


@pytest.mark.parametrize("version", ["0.5.18", "", "0.5.17.post1"])
def test_an_unknown_version_has_no_environment(version: str) -> None:
    with pytest.raises(UnknownVersion, match=r"0\.5\.17, 0\.5\.19"):
        environment(version)


def _fake_engine(folder: Path, version: str) -> None:
    (folder / f"sglang-{version}.dist-info").mkdir(parents=True)
    (folder / f"sglang-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    )


def _process(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process with the stand-ins and ``folder`` on its path. It prints a word if it was allowed to start."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PATCHBUNDLE_RIG")}
    return subprocess.run(
        [sys.executable, "-c", "print('started')"],
        env={**clean, "PYTHONPATH": f"{folder}{os.pathsep}{SITE}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("installed", "announced", "words"),
    [
        ("", "", "UnknownVersion: no sglang is installed"),
        ("0.5.18", "", "UnknownVersion: no stand-ins for sglang 0.5.18"),
        ("0.5.17", "0.5.19", "UnknownVersion: PATCHBUNDLE_RIG_ENGINE announces sglang 0.5.19, installed is 0.5.17"),
        ("0.5.17", "0.5.17", "StandInMoved: sglang 0.5.17: sgl_kernel.load_utils:_load_architecture_specific_ops"),
    ],
)
def test_a_process_does_not_start_on_the_wrong_engine(
    tmp_path: Path, installed: str, announced: str, words: str
) -> None:
    if installed:
        _fake_engine(tmp_path, installed)
    done = _process(tmp_path, PATCHBUNDLE_RIG_ENGINE=announced)
    assert done.returncode == 70
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


_LEASHED = """
import os, subprocess, sys
inner = "import time; from lab.rig.standins import start; start.leash(); print('held', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def _alive(pid: int) -> bool:
    """Whether the process still runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's own")
def test_a_leashed_process_ends_with_a_parent_that_was_killed() -> None:
    root = str(SITE.parents[3])
    variables = {**os.environ, "PYTHONPATH": root, "PATCHBUNDLE_RIG_LEASH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _LEASHED], env=variables, stdout=subprocess.PIPE, text=True, check=False
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    ended = not _alive(pid)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended


# The check of targets, on a tree made to fit


def _stub(entry: StandIn) -> tuple[list[str], str]:
    """Nested class names and a definition that the entry's target check accepts."""
    *outer, name = entry.name.split(".")
    if entry.how == "replace":
        source, _, ours = entry.by.partition(":")
        node = targets._find(ast.parse((_HERE / f"{source}.py").read_text()), ours)[-1]
        assert isinstance(node, ast.FunctionDef)
        return outer, f"def {name}({ast.unparse(node.args)}): ..."
    return outer, f"def {name}(*args): ..."


def _fitting_tree(root: Path, version: str) -> None:
    modules: dict[str, list[str]] = {}
    for entry in table.for_version(version):
        if entry.how == "empty":
            file = root.joinpath(*entry.module.split(".")[:-1], entry.module.rpartition(".")[2] + ".abi3.so")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            continue
        if not entry.readable:
            continue
        outer, text = _stub(entry)
        if entry.how == "add":
            text = "pass" if outer else ""
        for depth, part in enumerate(outer):
            text = "\n".join(f"class {part}:" if i == depth else line for i, line in enumerate(["", f"    {text}"]))
        modules.setdefault(entry.module, ["from __future__ import annotations"]).append(text)
    for module, lines in modules.items():
        file = root.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("version", table.VERSIONS)
def test_a_fitting_tree_has_no_problem_and_each_lost_module_is_one(tmp_path: Path, version: str) -> None:
    _fitting_tree(tmp_path, version)
    # Two stand-ins of one class give two classes of that name here; the last one counts for Python, all for us.
    assert targets.problems(version, [tmp_path]) == []
    for file in sorted(tmp_path.rglob("*.py")):
        text = file.read_text()
        file.unlink()
        assert targets.problems(version, [tmp_path]), file
        file.write_text(text)
    targets.check(version, [tmp_path])


def test_other_parameters_are_a_problem_that_shows_both(tmp_path: Path) -> None:
    _fitting_tree(tmp_path, table.DECODE)
    file = tmp_path / "sglang" / "kernels" / "jit" / "utils" / "arch.py"
    file.write_text("def is_arch_support_pdl(device): ...\n")
    with pytest.raises(StandInMoved, match=r"is_arch_support_pdl takes \['device'\], its stand-in takes \[\]"):
        targets.check(table.DECODE, [tmp_path])


def test_a_function_that_became_something_else_is_a_problem(tmp_path: Path) -> None:
    _fitting_tree(tmp_path, table.DECODE)
    file = tmp_path / "sglang" / "kernels" / "jit" / "utils" / "arch.py"
    file.write_text("is_arch_support_pdl = None\n")
    assert any("is not a function" in one for one in targets.problems(table.DECODE, [tmp_path]))


def test_an_earlier_root_hides_a_later_one(tmp_path: Path) -> None:
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    _fitting_tree(installed, table.DECODE)
    moved = tree / "sglang" / "kernels" / "jit" / "utils"
    moved.mkdir(parents=True)
    (moved / "arch.py").write_text("")
    assert targets.problems(table.DECODE, [installed]) == []
    assert any("is missing" in one for one in targets.problems(table.DECODE, [tree, installed]))


# The check against our patches

_BASE = """import os
from a import b
from c import d

LIMIT = 4


@decorated
def first(x):
    y = x
    return y


class Box:
    size = 1

    def put(self, x):
        self.x = x

    def get(self):
        return self.x


if LIMIT:
    def chosen():
        return 1
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("    y = x\n", "    y = x + 1\n", {"first"}),
        ("    return y\n", "    return y\n    # end\n", set()),
        ("    return y\n", "    return y\n    put = 1\n", {"first"}),
        ("class Box:", "class Box(dict):", {"Box"}),
        ("    size = 1\n", "    size = 1\n    call()\n", {"Box"}),
        ("    def get(self):\n        return self.x\n", "", {"Box.get"}),
        ("LIMIT = 4\n", "LIMIT = 4\n\n\ndef new():\n    return first\n", set()),
        ("@decorated\n", "@decorated\n@again\n", {"first"}),
        ("@decorated\n", "", {"first"}),
        ("        self.x = x\n", "        self.x = -x\n", {"Box.put"}),
        ("    size = 1\n", "    size = 2\n", {"Box.size"}),
        ("LIMIT = 4\n", "LIMIT = 5\n", {"LIMIT"}),
        ("from a import b\n", "from a import b\nfrom n import e\n", set()),
        ("from a import b\n", "from a import e\n", {"b"}),
        ("        return 1\n", "        return 2\n", {"chosen"}),
    ],
)
def test_a_change_belongs_to_the_function_that_holds_it(old: str, new: str, expected: set[str]) -> None:
    assert _BASE.count(old) == 1
    assert patches.touched(_BASE, _BASE.replace(old, new)) == expected


def test_a_stand_in_that_hides_a_patch_is_refused_and_a_neighbour_is_not(tmp_path: Path) -> None:
    module = Path("sglang/srt/speculative/eagle_utils.py")
    text = "def default_tree_mask_mode():\n    return 1\n\n\ndef other():\n    return 2\n"

    def tree(name: str, content: str) -> Path:
        file = tmp_path / name / module
        file.parent.mkdir(parents=True)
        file.write_text(content)
        return tmp_path / name

    stock = tree("stock", text)
    patches.check("decode", stock, tree("neighbour", text.replace("return 2", "return 3")))
    with pytest.raises(StandInConflict, match="default_tree_mask_mode is a stand-in"):
        patches.check("decode", stock, tree("hidden", text.replace("return 1", "return 3")))
    with pytest.raises(StandInConflict, match="default_tree_mask_mode is a stand-in"):
        patches.check("prefill", stock, tmp_path / "gone")


def test_a_package_that_moved_its_body_into_init_is_found_too() -> None:
    entry = _entry(target="pack.mod:f")
    assert patches.conflicts([("pack/mod/__init__.py", "f")], [entry])
    assert not patches.conflicts([("pack/mod/__init__.py", "g"), ("pack/other.py", "f")], [entry])


@pytest.mark.parametrize(
    ("changed", "stands_in", "found"),
    [
        ("Pool.put", "Pool", True),
        ("Pool", "Pool.put", True),
        ("Pool.Inner.put", "Pool", True),
        ("Pool.put", "Pool.put", True),
        ("Pool.put", "Pool.get", False),
        ("PoolTwo.put", "Pool", False),
        ("Pool", "PoolTwo", False),
        ("put", "Pool.put", False),
    ],
)
def test_a_class_and_its_methods_are_in_each_others_way(changed: str, stands_in: str, found: bool) -> None:
    told = patches.conflicts([("pack/mod.py", changed)], [_entry(target=f"pack.mod:{stands_in}")])
    assert bool(told) == found and all(f"changes {changed} in pack/mod.py" in words for words in told)


# Device calls and checks


def test_an_event_is_reached_at_once_but_its_time_needs_a_record() -> None:
    one, other = cuda.Event(enable_timing=True), cuda.Event()
    assert one.query()
    one.record()
    with pytest.raises(RuntimeError, match="recorded"):
        one.elapsed_time(other)
    cuda.current_stream().record_event(other)
    assert one.elapsed_time(other) == 0.0


def test_streams_nest_and_have_one_identity() -> None:
    assert cuda.current_stream() is cuda.default_stream("cuda:0")
    with cuda.stream(cuda.Stream()), cuda.Stream() as inner:
        inner.wait_stream(cuda.current_stream())
        inner.wait_event(inner.record_event())
    assert cuda.get_device_capability() == (9, 0)


class _Rope:
    """A module with the engine's two factories."""

    source = (
        "def get_rope(head_size, base, rope_scaling=None, dtype=None):\n    return ('plain', head_size, base, dtype)\n"
        "def get_rope_cpu(head_size, base, rope_scaling=None, dtype=None, device=None):\n"
        "    assert rope_scaling is not None\n    return ('cpu', device)\n"
    )


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"rope_type": None}])
def test_rope_without_scaling_comes_from_the_ordinary_factory(scaling: dict[str, Any] | None) -> None:
    module = _module(_Rope.source)
    factory = checks.plain_rope(module.get_rope_cpu)
    assert factory(64, 10000, rope_scaling=scaling, dtype="f", device="cpu") == ("plain", 64, 10000, "f")


def test_rope_with_scaling_still_comes_from_the_cpu_factory() -> None:
    module = _module(_Rope.source)
    assert checks.plain_rope(module.get_rope_cpu)(64, 1, {"rope_type": "deepseek_yarn"}, device="cpu") == ("cpu", "cpu")


def test_a_group_is_made_without_gpu_communicators_however_they_are_asked_for() -> None:
    seen: dict[str, Any] = {}

    def original(
        self: Any,
        ranks: list[int],
        use_pynccl: bool,
        use_pymscclpp: bool,
        use_custom_allreduce: bool,
        use_torch_symm_mem_all_reduce: bool,
        use_message_queue_broadcaster: bool = False,
    ) -> None:
        seen.update(locals())

    made = checks.group_without_gpu_communicators(original)
    made(object(), [0, 1], True, use_pymscclpp=True, use_custom_allreduce=True, use_torch_symm_mem_all_reduce=True,
         use_message_queue_broadcaster=True)  # fmt: skip
    assert [seen[name] for name in checks._GPU_COMMUNICATORS] == [False] * 4
    assert seen["use_message_queue_broadcaster"] is True
    assert seen["ranks"] == [0, 1]


def test_collectives_reach_the_named_group_and_a_destroyed_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Group:
        def _all_gather_into_tensor(self, output: Any, input: Any) -> None:
            calls.append(("gather", output, input))

        def _reduce_scatter_tensor(self, output: Any, input: Any) -> None:
            calls.append(("scatter", output, input))

    group = Group()
    module = ModuleType("sglang.srt.distributed.parallel_state")
    vars(module)["_groups"] = {"tp": lambda: group, "gone": lambda: None}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    groups.all_gather_into_tensor("o", "i", "tp")  # type: ignore[arg-type]
    groups.reduce_scatter_tensor("p", "j", "tp")  # type: ignore[arg-type]
    assert calls == [("gather", "o", "i"), ("scatter", "p", "j")]
    with pytest.raises(ValueError, match="gone is destroyed"):
        groups.all_gather_into_tensor("o", "i", "gone")  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        groups.reduce_scatter_tensor("o", "i", "other")  # type: ignore[arg-type]


def test_the_tree_mask_is_the_full_one() -> None:
    module = _module("class TreeMaskMode:\n    FULL_MASK = 'full'\ndef default_tree_mask_mode():\n    return 'short'\n")
    assert checks.full_tree_mask(module.default_tree_mask_mode)() == "full"


def test_the_pack_buffer_is_host_memory_also_when_the_device_is_named() -> None:
    seen = []
    made = staging.host_memory(lambda self, size, device, gpu_id, pool=None: seen.append((size, device, gpu_id, pool)))
    made(object(), 64, "cuda:1", 1)
    made(object(), 64, device="cuda:1", gpu_id=1, pool="p")
    assert seen == [(64, "cpu", 1, None), (64, "cpu", 1, "p")]


def test_memory_asked_for_as_pinned_is_ordinary_and_the_rest_is_torch() -> None:
    proxy: Any = cuda.unpinned_torch(torch)
    made = proxy.tensor([3, 5], dtype=torch.int32, pin_memory=True)
    assert made.tolist() == [3, 5] and made.dtype is torch.int32 and not made.is_pinned()
    assert proxy.cumsum is torch.cumsum


def test_calls_to_a_device_or_a_driver_that_is_not_there_take_what_they_are_given_and_do_nothing() -> None:
    data = torch.arange(3)
    checks.load_nothing()
    cuda.set_device("cuda:3")
    cuda.synchronize("cuda:0")
    cuda.record_stream(data, cuda.current_stream())
    flash_attention.no_schedule(batch_size=2, max_seqlen_q=1)
    assert data.tolist() == [0, 1, 2]


def test_overlap_stays_as_the_arguments_say() -> None:
    arguments = SimpleNamespace(disable_overlap_schedule=False)
    checks.allow_overlap(arguments)
    assert vars(arguments) == {"disable_overlap_schedule": False}


def test_the_index_logits_stand_under_the_names_of_their_kernels_with_a_split_that_is_copied() -> None:
    ours = indexer.deep_gemm
    assert ours.fp8_mqa_logits is indexer.mqa_logits and ours.fp8_paged_mqa_logits is indexer.paged_mqa_logits
    split = ours.get_paged_mqa_logits_metadata(torch.tensor([[5]]), 64, ours.get_num_sms())
    assert split.shape == (9, 2) and split.dtype == torch.int32 and not split.any()


def test_no_stand_in_is_without_a_test() -> None:
    """Every one of ours is named in a test of its own; what the tests then ask is in them."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))
    ours = {entry.by.partition(":")[2] for entry in table.TABLE if entry.by}
    assert not sorted(name for name in ours if not re.search(rf"\b{name}\b", text))


def test_plain_answers() -> None:
    assert checks.is_cuda() is checks.YES is True
    assert checks.no_pdl() is False
    assert checks.no_fused_store(1, 2, 3) is False
    box: Any = type(
        "Box", (), {"forward_cuda": lambda self, x: x + 1, "get_cuda_graph_seq_len_fill_value": lambda s: 1}
    )
    assert checks.the_cuda_forward(box(), 4) == 5
    assert checks.same_fill_value(box()) == 1
