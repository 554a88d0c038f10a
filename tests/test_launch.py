"""``apply.py env``: what starts a role, and that a combination which a patch refuses is refused here first."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomllib
from click.testing import CliRunner, Result

from patchbundle import cli, launch, manifest
from patchbundle.errors import BundleError, Reason

ROOT = Path(__file__).parents[1]
BUNDLE = manifest.load(ROOT)
SCHEMA = json.loads((ROOT / "tools/patchbundle/schema/launch-1.json").read_text(encoding="utf-8"))
ROLES = ("prefill", "decode", "router")
FILES = [ROOT / "config" / f"{name}.toml" for name in (*ROLES, "profile-16k")]


def env(*arguments: str) -> Result:
    return CliRunner().invoke(cli.apply_cli, ["env", *arguments])


def result(*arguments: str) -> dict[str, Any]:
    done = env(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout)["result"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_files_are_as_the_schema_says_and_hold_no_address(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    jsonschema.validate(tomllib.loads(text), SCHEMA)
    assert not re.search(r"\d+\.\d+\.\d+\.\d+|https?://|(?:^|[^a-z-])(?:model-path|host|port)\s*=", text)


@pytest.mark.parametrize("role", ROLES)
def test_every_gate_of_a_series_stands_in_its_file_and_none_besides(role: str) -> None:
    listed = launch.read(ROOT / "config" / f"{role}.toml")["gates"]
    assert set(listed) == set(launch.gates_of(BUNDLE, role))


def test_a_role_is_started_with_its_exports_and_arguments() -> None:
    made = result("prefill")
    assert made["environment"]["SGLANG_RESEARCH_DSA_CP4_ATP2"] == "1"
    assert "SGLANG_RESEARCH_DCP_GATHER_PRELOAD" not in made["environment"]
    assert "--tp-size=8" in made["arguments"] and "--enable-prefill-cp" in made["arguments"]
    lines = env("prefill").stdout.splitlines()
    assert "export SGLANG_ENABLE_CP_V2=1" in lines and "--attn-cp-size=4" in lines


def test_a_profile_lies_over_the_role() -> None:
    assert result("prefill", "--profile=16k")["environment"]["SGLANG_RESEARCH_DCP_GATHER_PRELOAD"] == "1"


def test_a_gate_that_is_off_needs_nothing() -> None:
    off = [f"--off={name}" for name in launch.gates_of(BUNDLE, "prefill")]
    made = result("prefill", "--argument=tp-size=4", *off)
    assert "--tp-size=4" in made["arguments"]
    assert not any(name.startswith("SGLANG_RESEARCH") for name in made["environment"])


def test_an_argument_that_is_false_is_left_out_and_one_without_a_value_is_a_flag() -> None:
    off = [f"--off={name}" for name in launch.gates_of(BUNDLE, "prefill")]
    made = result("prefill", "--argument=enable-dp-attention=false", "--argument=enable-metrics", *off)
    assert "--enable-dp-attention" not in made["arguments"] and "--enable-metrics" in made["arguments"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prefill", "--argument=tp-size=4"], "DSA_CP4_ATP2 needs tp-size = 8, not 4"),
        (["prefill", "--argument=tp-size=false"], "needs tp-size = 8, not unset"),
        (["prefill", "--argument=dp-size=true"], "needs dp-size = 1, not True"),
        (
            ["prefill", "--argument=enable-dsa-cache-layer-split"],
            "needs enable-dsa-cache-layer-split = False, not True",
        ),
        (["prefill", "--off=SGLANG_RESEARCH_DSA_CP4_ATP2"], "INPUT_SP needs SGLANG_RESEARCH_DSA_CP4_ATP2"),
        (["prefill", "--profile=16k", "--argument=chunked-prefill-size=8192"], "PRELOAD needs chunked-prefill-size"),
        (["prefill", "--on=SGLANG_RESEARCH_NOTHING"], "is a gate of no patch of the prefill series"),
        (["prefill", "--on=SGLANG_RESEARCH_DCP_RETRACT"], "is a gate of no patch of the prefill series"),
        (["decode", "--argument=speculative-eagle-topk=2"], "RETRACT_DRAFT_KV needs speculative-eagle-topk = 1"),
        (["decode", "--argument=dcp-size=4"], "PCP4_DCP2 needs dcp-size = 2, not 4"),
        (["decode", "--argument=disable-overlap-schedule"], "SETTLE_BEFORE_RETRACT needs disable-overlap-schedule"),
        (["router", "--argument=pd-disaggregation=false"], "STRICT_ACK needs pd-disaggregation = True, not unset"),
        (["prefill", "--argument=--tp-size=4"], "without dashes in front"),
        (["prefill", "--argument=tp=4"], "argument tp"),
        (["prefill", "--argument=tensor-parallel-size=8"], "argument tensor-parallel-size"),
        (["prefill", "--argument=tensor-par=4"], "expected: tp-size"),
        (["prefill", "--argument=enable-hierarchical"], "by which no gate would see it"),
        (["decode", "--argument=dp=2"], "expected: dp-size"),
        (["decode", "--argument=page=32"], "expected: page-size"),
        (["prefill", "--argument=tp-size=8.0"], "needs tp-size = 8, not 8.0"),
        (
            ["decode", "--off=SGLANG_RESEARCH_PCP4_DCP2", "--argument=dcp-size=4"],
            "DSA_DCP needs attention-tp-mod-dcp = 0",
        ),
        (["decode", "--on=SGLANG_RESEARCH_EXACT_TOPK", "--argument=page-size=48"], "EXACT_TOPK needs page-size = 64"),
        (["router", "--argument=prefill=grpc://worker"], "STRICT_ACK needs grpc-workers = False, not True"),
        (["prefill", "--profile=../prefill"], "small letters"),
    ],
)
def test_a_combination_that_would_not_start_is_refused_with_the_condition(arguments: list[str], said: str) -> None:
    done = env(*arguments)
    assert done.exit_code == 1
    assert said in done.output
    assert "export" not in done.stdout


def test_every_condition_that_fails_is_named_at_once() -> None:
    done = env("prefill", "--argument=tp-size=4", "--argument=cp-strategy=zigzag")
    assert "tp-size" in done.output and "cp-strategy" in done.output


def test_a_profile_that_is_not_there_is_named() -> None:
    done = env("prefill", "--profile=none")
    assert done.exit_code == 1 and "no such profile" in done.output and "16k" in done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[arguments\n", "TOML"),
        ('[arguments]\n"Tp Size" = 1\n', "a flag without its dashes"),
        ('[arguments]\nhost = "prefill-7"\n', "no address and no key"),
        ('[arguments]\napi-key = "x"\n', "no address and no key"),
        ('[arguments]\ndist-init-addr = "node"\n', "no address and no key"),
        ('[environment]\nHF_TOKEN = "x"\n', "no address and no key"),
        ('[arguments]\nmodel = "node7:8000"\n', "no address in a bundle"),
        ("[arguments]\nbootstrap-port = 8998\n", "no address and no key"),
        ('[arguments]\nmodel-path = "GLM"\n', "no address and no key"),
        ('[arguments]\nssl-keyfile = "x"\n', "no address and no key"),
        ('[environment]\nNCCL_SOCKET_IFNAME = "0"\n', "no address and no key"),
        *(
            (f'[{table}]\n{name} = "{text}"\n', "one of the engine's own words")
            for table, name in (("arguments", "served-model"), ("environment", "X"))
            for text in (
                "gpu01",
                "prefill-7" + ".internal",
                "fd00" + "::1",
                "001a2b3c4d5e",
                "001a.2b3c.4d5e",
                "0x0a010203",
                "a@b",
            )
        ),
        ('[environment]\nSGLANG_RESEARCH_INPUT_SP = "1"\n', "a gate in gates"),
        ('[environment]\nSMG_PD_STRICT_ACK = "1"\n', "a gate in gates"),
        ("[gates.X]\non = true\n[gates.X.needs]\ntp = 'node7'\n", "one of the engine's own words"),
        ('[arguments]\nmodel = "tcp://prefill"\n', "no address in a bundle"),
        ('[environment]\nNIC = "0a:1b:2c:3d:4e:5f"\n', "no address in a bundle"),
        ("[arguments]\ntp = [1]\n", "a string, a number"),
        ("arguments = 1\n", "a table"),
        ("[environment]\nlower = 'x'\n", "a variable's name"),
        ("[environment]\nX = 1\n", "a string"),
        ("gates = 1\n", "a table"),
        ("[gates.X]\n", "missing on"),
        ("[gates.X]\non = 1\n", "true or false"),
        ("[gates.X]\non = true\nmore = 1\n", "unknown more"),
        ("[gates.X]\non = true\nneeds = 1\n", "a table"),
        ("[gates.X]\non = true\nkeeps = 1\n", "a table"),
        ("[gates.X]\non = true\n[gates.X.keeps]\ntp = [1]\n", "a string, a number"),
        ("[gates.X]\non = true\n[gates.X.needs]\n'--tp' = 1\n", "without dashes"),
        ("[gates.X]\non = true\n[gates.X.needs]\ntp = [1]\n", "a string, a number"),
        ("[gates.X]\non = true\ngates = 'Y'\n", "a list of gates"),
        ("[other]\n", "unknown other"),
    ],
)
def test_a_file_that_is_not_as_described_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "prefill.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BundleError) as error:
        launch.read(path)
    assert error.value.reason is Reason.MANIFEST
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("gate", "source"),
    [
        ("SGLANG_RESEARCH_DSA_CP4_ATP2", "prefill/cp_topology.py"),
        ("SGLANG_RESEARCH_DCP_BOUNDED_PACK", "prefill/bounded_pack.py"),
        ("SGLANG_RESEARCH_PCP4_DCP2", "prefill/pcp4_dcp2.py"),
    ],
)
def test_what_a_patch_asks_of_a_launch_is_all_asked_here(gate: str, source: str) -> None:
    """Every (argument, value) of the source's own table, and of the one that all patches share."""
    asked: dict[str, Any] = {}
    for path, places in ((source, ("check_start", "_CONDITIONS")), ("shared/gates.py", ("NO_OUTER_CACHE",))):
        for node in ast.parse((ROOT / "sources" / path).read_text(encoding="utf-8")).body:
            target = node.target if isinstance(node, ast.AnnAssign) else node
            if getattr(target, "id", getattr(target, "name", "")) in places:
                for pair in ast.walk(node):
                    if isinstance(pair, ast.Tuple) and len(pair.elts) == 2:
                        name, value = pair.elts
                        if isinstance(name, ast.Constant) and isinstance(value, ast.Constant):
                            asked[str(name.value).replace("_", "-")] = value.value
    listed = launch.read(ROOT / "config/prefill.toml")["gates"][gate]
    given = {**listed.needs, **listed.keeps}
    assert len(asked) >= 6
    # None and False are the same: the argument is not there.
    assert {name: given.get(name, "nothing") for name in asked} == {
        name: value or False for name, value in asked.items()
    }


@pytest.mark.parametrize(
    ("gate", "source", "function", "besides"),
    [
        # attention-tp-mod-dcp stands for four; and flashmla_kv, which is asked for, takes every dtype.
        (
            "DSA_DCP",
            "dsa_dcp_guard",
            "_conditions",
            {"tp_size", "dp_size", "enable_dp_attention", "dcp_size", "kv_cache_dtype"},
        ),
        ("SETTLE_BEFORE_RETRACT", "settle", "admit", set()),
        ("DRAFT_SEED_RECOMPUTE", "seed", "admit", set()),
        # With it the other gate of the two is asked for whatever its size.
        ("RETRACT_DRAFT_KV", "retract_draft", "admit", {"dcp_size"}),
        ("EXACT_TOPK", "exact_topk", "admit", set()),
    ],
)
def test_every_argument_that_a_decode_patch_looks_at_is_looked_at_here(
    gate: str, source: str, function: str, besides: set[str]
) -> None:
    tree = ast.parse((ROOT / f"sources/decode/{source}.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    asked = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("args", "server_args")
    }
    listed = launch.read(ROOT / "config/decode.toml")["gates"][f"SGLANG_RESEARCH_{gate}"]
    assert asked and besides <= asked
    assert asked - besides <= {name.replace("-", "_") for name in (*listed.needs, *listed.keeps)}


def test_the_words_of_the_schema_are_those_of_the_reader_and_each_file_may_say_them_alone() -> None:
    assert set(SCHEMA["$defs"]["word"]["enum"]) == launch.WORDS
    for table in ({"arguments": {"model": "node7"}}, {"environment": {"X": "node7"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table, SCHEMA)


def test_a_file_of_config_that_is_not_as_described_fails_the_check_of_the_bundle(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "config", tmp_path / "config")
    launch.check_files(tmp_path)
    with (tmp_path / "config/profile-more.toml").open("w", encoding="utf-8") as file:
        file.write('[arguments]\nmodel = "node7"\n')
    with pytest.raises(BundleError) as error:
        launch.check_files(tmp_path)
    assert error.value.reason is Reason.MANIFEST


GATE = "SGLANG_RESEARCH_X"


def faults(gate: launch.Gate, **given: Any) -> list[str]:
    """Of a launch with one gate; underscores stand for dashes, and upper case is a variable."""
    arguments = {name.replace("_", "-"): value for name, value in given.items() if name.islower()}
    environment = {name: value for name, value in given.items() if name.isupper()}
    one = launch.Launch("decode", arguments, environment, {GATE: gate})
    return list(launch.faults(one, {GATE: "x"}))


@pytest.mark.parametrize(
    ("gate", "given", "said"),
    [
        (launch.Gate(True, keeps={"pp-size": 1}), {"pp_size": 2}, "needs pp-size unset or 1, not 2"),
        (launch.Gate(True, keeps={"a": "b"}), {"a": True}, "needs a unset or b, not True"),
        (launch.Gate(True, needs={"steps": ">= 2"}), {"steps": 1}, "needs steps = >= 2, not 1"),
        (launch.Gate(True, needs={"steps": ">= 2"}), {"steps": True}, "not True"),
        (launch.Gate(True, needs={"steps": ">= 2"}), {"steps": "many"}, "not many"),
        (launch.Gate(True, needs={"steps": ">= 2"}), {}, "not unset"),
        (launch.Gate(True, needs={"attention-tp": 2}), {"tp_size": 8}, "needs attention-tp = 2, not 8"),
        (
            launch.Gate(True, needs={"attention-tp": 2}),
            {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True, "attn_cp_size": 2, "x": 0},
            "",
        ),
        (launch.Gate(True, needs={"attention-tp": 2}), {"tp_size": "eight"}, "not unset"),
        (
            launch.Gate(True, needs={"attention-tp": 2}),
            {"tp_size": 8, "dp_size": 0, "enable_dp_attention": True},
            "unset",
        ),
        (launch.Gate(True, needs={"V": False}), {"V": "1"}, "needs V = False, not 1"),
        (launch.Gate(True, keeps={"pp-size": 1}), {"pp_size": 1}, ""),
        (launch.Gate(True, keeps={"pp-size": 1}), {}, ""),
        (launch.Gate(True, keeps={"pp-size": 1}), {"pp_size": False}, ""),
        (launch.Gate(True, needs={"steps": ">= 2"}), {"steps": 5}, ""),
        (launch.Gate(True, needs={"steps": ">= 2"}), {"steps": 2}, ""),
        (launch.Gate(False, needs={"a": 1}, keeps={"b": 2}), {"b": 3}, ""),
    ],
    ids=str,
)
def test_a_condition_says_what_it_wants_and_what_it_found(gate: launch.Gate, given: dict[str, Any], said: str) -> None:
    found = faults(gate, **given)
    assert said in found[0] if said else not found, found
