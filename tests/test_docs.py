"""The documentation says what the code does: lists in it are compared with the code, links and names resolve."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from patchbundle import __version__, bases, cli, header, journal, manifest, scan
from patchbundle.errors import BundleError, Exit, Reason

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tools" / "patchbundle"
# The scan's own walk: it does not enter what is made on the machine.
PAGES = [path for path in scan.files(ROOT) if path.suffix == ".md"]
HOUSE = [
    *PAGES,
    ROOT / "NOTICE",
    ROOT / ".pre-commit-config.yaml",
    ROOT / ".editorconfig",
    ROOT / ".gitattributes",
    ROOT / "docs" / "states.svg",
]
COMMANDS: dict[str, click.Command] = {**cli.apply_cli.commands, "check_sources.py": cli.check_cli}
TARGET_VERBS = ("apply", "revert", "plan", "status", "explain", "attest", "check_sources.py")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


REFERENCE = page("docs/reference.md")


def section(text: str, title: str) -> str:
    """The text below a heading, down to the next heading of its own or a higher level."""
    match = re.search(rf"^(#+) {re.escape(title)}\n", text, re.MULTILINE)
    assert match is not None, f"no heading {title!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """The cells of every line of every table, heads and rules left out."""
    result: list[list[str]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_head = number + 1 < len(lines) and re.fullmatch(r"\|(?:-+\|)+", lines[number + 1].replace(" ", ""))
        is_rule = re.fullmatch(r"\|(?:-+\|)+", line.replace(" ", ""))
        if line.startswith("|") and not is_head and not is_rule:
            result.append([cell.strip() for cell in line.strip("|").split("|")])
    return result


def code(text: str) -> list[str]:
    """What stands in back quotes."""
    return re.findall(r"`([^`]+)`", text)


def slug(heading: str) -> str:
    """The anchor that a heading gets on the usual hosts."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def links(text: str) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", prose)


def options_of(command: click.Command) -> set[str]:
    group = click.Context(cli.apply_cli, **cli.apply_cli.context_settings)
    context = click.Context(command, parent=group)
    return {
        option
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        for option in [*parameter.opts, *parameter.secondary_opts]
    }


# Refusals and exit codes.


def refusals() -> list[list[str]]:
    return rows(section(REFERENCE, "Refusals"))


def test_every_refusal_is_in_the_reference_with_its_sentence_and_exit_code() -> None:
    documented = {code(word)[0]: (sentence, int(number)) for word, sentence, number, _ in refusals()}
    errors = [BundleError(reason, "somewhere") for reason in Reason]
    assert documented == {error.code: (error.reason.value, int(error.exit_code)) for error in errors}


def test_no_refusal_is_in_the_reference_twice_or_without_advice() -> None:
    words = [row[0] for row in refusals()]
    assert len(words) == len(set(words))
    assert all(len(row) == 4 and row[3] for row in refusals())


def test_the_exit_code_table_is_the_enumeration() -> None:
    table = {int(number): code(name)[0] for number, name, _ in rows(section(REFERENCE, "Exit codes"))}
    assert table == {int(member): member.name for member in Exit}


def test_the_shape_of_a_refusal_as_text_is_the_one_that_is_printed() -> None:
    shape = section(REFERENCE, "Refusals").split("```text\n")[1].split("```")[0]
    error = BundleError(Reason.DRIFT, "…", expected="…", found="…", next_step="…")
    assert shape == str(error).replace(Reason.DRIFT.value, "SENTENCE").replace("drift", "WORD") + "\n"


# Verbs and options.


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_synopsis_of_a_verb_has_exactly_its_options(verb: str) -> None:
    synopsis = section(REFERENCE, verb).split("```text\n")[1].split("```")[0]
    assert synopsis.startswith("check_sources.py " if verb == "check_sources.py" else f"apply.py {verb} ")
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", synopsis)) == options_of(COMMANDS[verb])


def test_every_verb_has_a_section_and_every_section_a_verb() -> None:
    headings = re.findall(r"^### (.+)$", section(REFERENCE, "Verbs"), re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)


def test_the_table_of_options_has_each_option_of_each_verb() -> None:
    documented = {option.split()[0] for row in rows(section(REFERENCE, "Options")) for option in code(row[0])}
    real = {option for command in COMMANDS.values() for option in options_of(command)}
    assert documented == real


def test_the_table_of_options_says_which_verbs_have_them() -> None:
    for cell, verbs, _ in rows(section(REFERENCE, "Options")):
        long = next(option.split()[0] for option in code(cell) if option.startswith("--"))
        real = {name for name, command in COMMANDS.items() if long in options_of(command)}
        named = set(code(verbs)) | (set(TARGET_VERBS) if "target verbs" in verbs else set())
        if verbs in {"every verb", "everywhere"}:
            named = set(COMMANDS)
        if verbs == "both commands":
            assert long in options_of(cli.apply_cli)
            named = {"check_sources.py"}
        assert named == real, cell


@pytest.mark.parametrize("option", ["--expect", "--role"])
def test_the_words_that_an_option_takes_are_in_its_row(option: str) -> None:
    parameter = next(p for p in cli.check_cli.params if option in p.opts)
    assert isinstance(parameter.type, click.Choice)
    row = next(row for row in rows(section(REFERENCE, "Options")) if row[0].startswith(f"`{option} "))
    assert set(parameter.type.choices) <= set(code(row[2]))


# JSON.


def verbs() -> Iterator[ast.AST]:
    """The source of what the verbs say."""
    for name in ("cli.py", "change.py"):
        yield from ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8")))


def result_keys() -> set[str]:
    """Every key that a verb puts into ``report.result``, read from its source."""
    keys: set[str] = set()
    for node in verbs():
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "report.result":
            assert isinstance(node.slice, ast.Constant)
            keys.add(str(node.slice.value))
    return keys


def inner_keys(name: str) -> set[str]:
    """The keys of the table that a verb assigns to ``report.result[name]``, and those that it adds later."""
    keys: set[str] = set()
    for node in verbs():
        place = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.Assign) and place == f"report.result[{name!r}]":
            assert isinstance(node.value, ast.Dict)
            keys |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
        elif place.startswith(f"report.result[{name!r}]["):
            keys.add(ast.literal_eval(place.removeprefix(f"report.result[{name!r}][").removesuffix("]")))
    assert keys, name
    return keys


def test_every_key_of_a_result_is_in_the_reference_and_no_other() -> None:
    text = section(REFERENCE, "JSON").split("| key of `result`")[1].split("| key of `status`")[0]
    documented = {key for row in rows("| key of `result`" + text) for key in code(row[0])}
    assert documented == result_keys()


def test_every_key_of_a_status_is_in_the_reference_and_no_other() -> None:
    text = section(REFERENCE, "JSON").split("| key of `status`")[1]
    documented = {key for row in rows("| key of `status`" + text) for key in code(row[0])}
    assert documented == inner_keys("status")


@pytest.mark.parametrize("name", ["plan", "target", "bundle", "attestation"])
def test_the_row_of_a_nested_table_names_its_keys(name: str) -> None:
    text = section(REFERENCE, "JSON")
    row = next(row for row in rows(text) if row[0] == f"`{name}`")
    assert inner_keys(name) <= set(code(row[2]))


def test_the_collection_has_the_version_of_the_tools() -> None:
    galaxy = (ROOT / "deploy/ansible/ansible_collections/patchbundle/fleet/galaxy.yml").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in galaxy


def test_the_example_of_an_output_has_the_keys_of_a_real_one() -> None:
    example: dict[str, Any] = json.loads(section(REFERENCE, "JSON").split("```json\n")[1].split("```")[0])
    answer = CliRunner().invoke(cli.apply_cli, ["status", "--json", "--bundle", str(ROOT / "docs")])
    real: dict[str, Any] = json.loads(answer.stdout)
    assert answer.exit_code == Exit.REFUSED
    assert set(real) == set(example)
    assert (real["schema"], real["tool"]) == (example["schema"], example["tool"])
    documented = {key for row in rows(section(REFERENCE, "JSON"))[:6] for key in code(row[0])}
    assert documented == set(real["error"])


# Files, environment, modules.


def bundle_with(folder: Path, name: str, text: str) -> Path:
    """A bundle of nothing but our bases and an empty series, in which one file holds ``text``."""
    for path in (ROOT / "config").iterdir():
        (folder / "config").mkdir(exist_ok=True)
        (folder / "config" / path.name).write_bytes(path.read_bytes())
    for top in ("patches", "sources"):
        (folder / top).mkdir()
    (folder / "patches/series.toml").write_text("schema = 1\n", encoding="utf-8")
    (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("title", "text"),
    [
        ("config/bases.toml", 'schema = 1\n[bases."x"]\nsurprise = 1\n'),
        ("patches/series.toml", "schema = 1\n[[patch]]\nsurprise = 1\n"),
    ],
    ids=["bases", "series"],
)
def test_the_keys_of_a_manifest_in_the_reference_are_those_that_it_may_have(
    title: str, text: str, tmp_path: Path
) -> None:
    documented = {key for row in rows(section(REFERENCE, title)) for key in code(row[0])}
    with pytest.raises(BundleError) as refusal:
        manifest.load_unlocked(bundle_with(tmp_path, title, text))
    assert refusal.value.expected == f"the keys {', '.join(sorted(documented))}"


def test_the_keys_of_journal_and_receipt_are_in_the_reference() -> None:
    dumped = json.loads(journal.Journal("prepare", "", "", "", "", (), (), (), ()).dump())
    assert set(dumped) <= set(code(section(REFERENCE, "The journal")))
    assert {"schema", "bundle", "base", "role", "level", "patches"} <= set(code(section(REFERENCE, "The receipt")))


def test_the_names_that_a_run_leaves_beside_files_are_the_documented_ones() -> None:
    text = section(REFERENCE, "The journal")
    assert f"`{journal.NAME}`" in text
    assert journal.BESIDE in page("docs/states.md")
    from patchbundle.identity import Identity

    step = journal.Step.of(7, "a/b.py", Identity.of(b"1"), Identity.of(b"2"))
    for path, ending in ((step.stage, "new"), (step.backup, "old")):
        assert path == f"a/.patchbundle-7.{ending}"
        assert f"`.patchbundle-N.{ending}`" in text


def test_every_environment_variable_that_the_tools_read_is_in_the_reference() -> None:
    read: set[str] = set()
    for path in PACKAGE.glob("*.py"):
        read |= set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', path.read_text(encoding="utf-8")))
    documented = {name for row in rows(section(REFERENCE, "Environment")) for name in code(row[0])}
    assert "PATCHBUNDLE_CACHE" in read
    assert read <= documented


def test_the_header_of_the_example_patch_is_accepted_and_its_keys_are_explained() -> None:
    text = section(page("docs/authoring.md"), "The header")
    example = text.split("```text\n")[1].split("\ndiff --git")[0]
    parsed = header.Header.parse(tuple(example.split("\n")), "docs/authoring.md")
    assert parsed.gate_name == "SGLANG_RESEARCH_EXAMPLE"
    table = rows(text)
    assert [code(row[0])[0] for row in table] == list(header.KEYS)
    assert set(header.CLASSES) <= set(code(table[header.KEYS.index("Class")][1]))


def test_the_places_where_sources_land_are_those_of_the_bases() -> None:
    table = {
        code(cell)[0].split("/")[0]: code(place)[0].removesuffix("/NAME")
        for areas, place, _ in rows(section(page("docs/authoring.md"), "The sources"))
        for cell in areas.split(",")
    }
    real = {
        area: folder
        for base in bases.load(ROOT / "config/bases.toml").values()
        for area, folder in base.install.items()
    }
    assert table == real


def test_every_module_is_in_the_architecture_and_no_other() -> None:
    documented = [code(row[0])[0] for row in rows(section(page("docs/design.md"), "Modules"))]
    real = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert len(documented) == len(set(documented))
    assert set(documented) == real


def test_every_target_of_make_is_in_the_reference() -> None:
    real = set(re.findall(r"^([a-z][a-z-]*):.*## ", page("Makefile"), re.MULTILINE)) - {"help"}
    documented = {name for row in rows(section(REFERENCE, "Make")) for name in code(row[0])}
    assert {f"make {name}" for name in real} <= documented


# States.


def test_the_state_words_of_the_page_are_those_of_the_code() -> None:
    source = (PACKAGE / "state.py").read_text(encoding="utf-8").split("def _word(")[1]
    strings = re.findall(r'(?:return|else|if step else) f?"([a-z{][^"]*)"', source)
    words = {re.sub(r"\{[^}]*\}", "k", word) for line in strings for word in [line]} | set(
        re.findall(r'else "([a-z]+)"', source)
    )
    documented = {code(row[0])[0] for row in rows(section(page("docs/states.md"), "The words of `status`"))[:9]}
    assert words == documented


@pytest.mark.parametrize("name", ["docs/states.md", "docs/states.svg"])
def test_the_pictures_show_each_phase_of_the_journal_in_order(name: str) -> None:
    text = page(name).split("```text\n")[1].split("```")[0] if name.endswith(".md") else page(name).split("</desc>")[1]
    places = [re.search(rf"[\[>] ?{phase}[ <]", text) for phase in journal.PHASES]
    assert all(places)
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)


def test_the_picture_is_well_formed_and_shows_each_state() -> None:
    words = " ".join(ElementTree.parse(ROOT / "docs/states.svg").getroot().itertext())
    table = rows(section(page("docs/states.md"), "The five states"))
    assert len(table) == 5
    for row in table:
        assert row[0].strip("*").split(" at ")[0] in words, row[0]


def test_the_table_of_commands_has_a_row_for_each_verb_that_has_a_target() -> None:
    text = " ".join(row[0] for row in rows(section(page("docs/states.md"), "What each command does in each state")))
    for verb in (*TARGET_VERBS, "recover"):
        assert f"`{verb}" in text


# Links and names.


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_resolves(path: Path) -> None:
    for link in links(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), f"{path.name}: {link}"
        if anchor:
            assert anchor in anchors(place.read_text(encoding="utf-8")), f"{path.name}: {link}"


def test_every_page_that_a_message_of_the_code_points_to_exists() -> None:
    named = 0
    for path in [*PACKAGE.glob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for name, title in re.findall(r"(docs/[a-z]+\.md)(?:, '([^']+)')?", path.read_text(encoding="utf-8")):
            named += 1
            assert (ROOT / name).is_file(), f"{path.name}: {name}"
            assert not title or section(page(name), title), f"{path.name}: {name}, {title}"
    assert named >= 4


def named_tests() -> list[str]:
    """Every ``tests/…::name`` of the README."""
    return re.findall(r"`(tests/[\w/.-]+\.py(?:::\w+)?)`", page("README.md"))


def test_every_test_that_the_readme_names_exists() -> None:
    names = named_tests()
    assert names
    missing = []
    for name in names:
        file, _, function = name.partition("::")
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if not path.is_file() or (function and function not in defined):
            missing.append(name)
    assert not missing


def test_every_claim_of_the_readme_names_a_test() -> None:
    table = rows(section(page("README.md"), "What it promises"))
    assert len(table) >= 10
    for row in table:
        assert code(row[1]), row[0]
        assert all("::" in name for name in code(row[1])), row[0]


# What may not stand in them.

_MACHINE = re.compile(r"(?<![\w.$~}>…/-])/(?:work|tmp|root|home|Users|mnt|data|scratch|workspace|opt)(?:/|\b)")
# Written in parts, so that this file itself names none.
_REGISTRY = re.compile(
    r"pypi\.org|python"
    r"hosted|files\.python|crates\.io|npmjs|docker\.(?:io|com)|quay\.io|ghcr\.io|conda\.|anaconda\.",
    re.I,
)


@pytest.mark.parametrize("path", HOUSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_names_no_machine_path_no_registry_and_nothing_that_the_scan_refuses(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not _MACHINE.search(text)
    assert not _REGISTRY.search(text)
    assert list(scan.scan_bytes(path.name, path.read_bytes())) == []


@pytest.mark.parametrize("folder", ["work", "tmp", "root", "home"])
@pytest.mark.parametrize("text", ["see /{}/x", "`/{}/x`", "at /{}."])
def test_the_look_for_machine_paths_finds_one(text: str, folder: str) -> None:
    assert _MACHINE.search(text.format(folder))


def test_the_readme_counts_the_missed_bounds_of_the_top_k_as_its_result_does() -> None:
    rows = json.loads((ROOT / "evidence" / "topk" / "speed.json").read_text(encoding="utf-8"))["rows"]
    bounds = [row["holds"] for row in rows if row.get("must") is not None and row["name"].endswith(" randn")]
    assert len(bounds) == 14
    missed = ("none", "one", "two", "three", "four", "five", "six")[bounds.count(False)]
    assert f"{missed} of fourteen of which miss" in " ".join(page("README.md").split())


def is_news(text: str) -> bool:
    lines = text.splitlines()
    return bool(lines) and lines[0].startswith("- ") and all(line.startswith(("- ", "  ")) for line in lines)


def test_a_news_fragment_is_a_list_as_its_readme_says() -> None:
    # Right after a release there is none, so the rule is also tried on lists that break it.
    assert is_news("- one\n  more\n- two\n")
    assert not any(is_news(text) for text in ("", "one\n", "  one\n", "- one\nmore\n"))
    fragments = [path for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md"]
    assert [path.name for path in fragments if not is_news(path.read_text(encoding="utf-8"))] == []


def test_git_never_converts_a_byte_of_a_patch_a_source_or_the_lock() -> None:
    lines = [line.split() for line in page(".gitattributes").splitlines() if line and not line.startswith("#")]
    for pattern in ("*", "*.patch", "patches/**", "sources/**", "config/**", "patches/pins.lock"):
        assert any(line[0] == pattern and "-text" in line for line in lines), pattern


def test_the_hooks_call_only_the_tools_of_the_clone() -> None:
    entries = re.findall(r"entry: (\S+)", page(".pre-commit-config.yaml"))
    assert entries
    assert all(entry.startswith(".venv/bin/") for entry in entries)
    assert set(re.findall(r"repo: (\S+)", page(".pre-commit-config.yaml"))) == {"local"}
