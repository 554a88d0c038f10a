"""dp-aware-pd-dispatch: the std-only module under rustc, and that no rank name is used as a URL any more."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.engine.router.rust import SOURCES, assert_all_caught, assert_all_pass

Tree = Callable[[str], Path]
PD_ROUTER = "src/routers/http/pd_router.rs"

MUTANTS = [
    ("rsplit_once('@')", "split_once('@')"),
    ("rank.bytes().all(|byte| byte.is_ascii_digit())", "!rank.is_empty()"),
    ("Err(_) => (name, None)", "Err(_) => (url, None)"),
    ("let url = url.trim();", ""),
    ("scheme.contains(['/', '\\\\', '?', '#', '@'])", "true"),
    ("trim_start_matches(['/', '\\\\', '\\t', '\\n', '\\r'])", 'trim_start_matches("//")'),
    ("trim_start_matches(['/', '\\\\', '\\t', '\\n', '\\r'])", "trim_start_matches(['/', '\\\\'])"),
    ("trim_start_matches(['/', '\\\\', '\\t', '\\n', '\\r'])", "trim_start_matches(['/', '\\t', '\\n', '\\r'])"),
    ("'/' | '\\\\' | '?' | '#'", "'/' | '?' | '#'"),
    ("'/' | '\\\\' | '?' | '#'", "'/' | '\\\\' | '#'"),
    ("'/' | '\\\\' | '?' | '#'", "'/' | '\\\\' | '?'"),
    ("in_place_of_host.or_else", "None.or_else"),
    ("url.rsplit_once('@')", "named.rsplit_once('@')"),
    ("host.split(':').next().unwrap_or(host)", "host"),
    ("unescaped(&host.replace(['\\t', '\\n', '\\r'], \"\"))", "unescaped(host)"),
    ("unescaped(&host.replace(['\\t', '\\n', '\\r'], \"\"))", "host.replace(['\\t', '\\n', '\\r'], \"\")"),
    ("!scheme.contains(['/', '\\\\', '?', '#', '@'])", "true"),
    ("trim_end_matches(['.', '\\u{3002}', '\\u{ff0e}', '\\u{ff61}'])", "trim_end_matches('.')"),
    ("trim_end_matches(['.', '\\u{3002}', '\\u{ff0e}', '\\u{ff61}'])", "trim_end_matches('\\u{3002}')"),
    (" && !digits.starts_with('+')", ""),
    ("byte == b'%' && ", ""),
    ("if escaped.is_some() { 3 } else { 1 }", "if escaped.is_some() { 1 } else { 1 }"),
    ("u8::from_str_radix(digits, 16)", "digits.parse()"),
    ('host.strip_prefix("0x").or_else(|| host.strip_prefix("0X"))', 'host.strip_prefix("0x")'),
    ('host.strip_prefix("0x").or_else(|| host.strip_prefix("0X"))', 'host.strip_prefix("0X")'),
    ("digits.bytes().all(|byte| byte.is_ascii_hexdigit())", "true"),
    ("is_ascii_hexdigit", "is_ascii_digit"),
    ("!host.is_empty() && host.chars()", "host.chars()"),
    ("host.chars().all(char::is_numeric)", "host.bytes().all(|byte| byte.is_ascii_digit())"),
    ("rank < ranks", "rank <= ranks"),
    ("if !wish.parse().is_ok_and", "if wish.parse().is_ok_and"),
    ("rank: usize| rank", "rank: isize| (rank.max(0) as usize)"),
    ("wish.chars().take(100).collect::<String>()", "wish"),
    ("ranks.saturating_sub(1)", "(ranks - 1)"),
    ("size > 1", "size > 0"),
    ("split(name).0", "name"),
]


def test_the_modules_own_tests_pass_under_bare_rustc(tmp_path: Path) -> None:
    assert_all_pass(tmp_path, "pd_rank")


def test_a_broken_module_is_caught_by_its_own_tests(tmp_path: Path) -> None:
    assert_all_caught(tmp_path, "pd_rank", MUTANTS)


def test_the_pd_router_sends_to_no_workers_name(stock: Tree, patched: Tree) -> None:
    def sent(root: Path) -> list[str]:
        code = (root / PD_ROUTER).read_text().partition("#[cfg(test)]")[0]
        built = re.findall(r"build_post_with_headers\(\s*&self\.client,\s*(\w+\.\w+)\(\)", code)
        built += re.findall(r"health_generate\", (\w+\.\w+)\(\)\)", code)
        return sorted(built + re.findall(r"first\(\)\.map\(\|w\| (w\.\w+)\(\)", code))

    names = ["decode.base_url", "decode.base_url", "prefill.base_url", "prefill.base_url", "w.base_url"]
    assert sent(patched("router")) == names
    assert sent(stock("router")) == [name.replace("base_url", "url") for name in names]


def test_the_fan_out_and_the_loads_use_urls_too(patched: Tree) -> None:
    text = (patched("router") / "src/core/worker_manager.rs").read_text()
    assert 'format!("{}/{}", worker.base_url(), endpoint)' in text
    assert "parse_load_response(&client, &base_url, api_key.as_deref())" in text


def test_the_bootstrap_host_is_read_from_the_url_without_its_rank(patched: Tree) -> None:
    text = (patched("router") / "src/core/worker_builder.rs").read_text()
    build = text[text.index("let plain_url = crate::routers::http::pd_rank::without_rank(&self.url);") :]
    build = build[: build.index("let bootstrap_port")]
    assert build.count("parse(plain_url)") == 1 and 'format!("http://{}", plain_url)' in build


def test_no_request_is_copied_where_no_leg_has_several_ranks() -> None:
    text = (SOURCES / "pd_dp.rs").read_text()
    plain = text.index("return Ok((Cow::Borrowed(request), Cow::Borrowed(request)));")
    assert plain < text.index(".clone()")
