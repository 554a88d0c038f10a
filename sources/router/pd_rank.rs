//! Data-parallel ranks in worker URLs and in requests.
//!
//! The router names rank 2 of the worker `http://host:port` by `http://host:port@2`. That is a name and no URL: read as
//! a URL it means user `host`, password `port`, host `0.0.0.2`.
//!
//! Standard library only, so that `rustc --test` runs the tests below without any crate.

/// Split a worker's name into its URL and the rank after the last `@`; no rank unless that is a number.
pub fn split(name: &str) -> (&str, Option<usize>) {
    match name.rsplit_once('@') {
        Some((url, rank)) if rank.bytes().all(|byte| byte.is_ascii_digit()) => match rank.parse() {
            Ok(rank) => (url, Some(rank)),
            Err(_) => (name, None),
        },
        _ => (name, None),
    }
}

/// The URL of a worker without its rank.
pub fn without_rank(name: &str) -> &str {
    split(name).0
}

/// Refuse a worker URL that an operator gave with a rank of its own.
///
/// # Errors
/// Says what to write instead.
pub fn refuse_rank(url: &str) -> Result<(), String> {
    match rank_in(url) {
        None => Ok(()),
        Some((plain, rank)) => Err(format!(
            "worker URL {url} holds a data-parallel rank (@{rank}); give {plain} and let --dp-aware find the ranks"
        )),
    }
}

/// The rank in a URL that an operator gave, and what stands before it: a number behind an `@` at its end, or where a URL
/// has its host, whatever is behind that. A reader of URLs takes such a number for an address, in base 16 too. It leaves
/// out the blanks around a URL, line ends and tabs in it, slashes before its host and a dot at the end of that, and reads
/// escapes and digits of other widths. Not every spelling is known here: it also leaves out characters without a width.
fn rank_in(url: &str) -> Option<(&str, String)> {
    let url = url.trim();
    let behind = match url.split_once(':') {
        Some((scheme, behind)) if !scheme.contains(['/', '\\', '?', '#', '@']) => behind,
        _ => url,
    };
    let behind = behind.trim_start_matches(['/', '\\', '\t', '\n', '\r']);
    let path = behind.trim_start_matches(|one| !matches!(one, '/' | '\\' | '?' | '#'));
    let named = url.strip_suffix(path).unwrap_or(url);
    let number = |host: &str| {
        let host = unescaped(&host.replace(['\t', '\n', '\r'], ""));
        let rank = host.trim_end_matches(['.', '\u{3002}', '\u{ff0e}', '\u{ff61}']);
        is_number(rank).then(|| rank.to_string())
    };
    let in_place_of_host = named.rsplit_once('@').and_then(|(plain, host)| {
        let host = host.split(':').next().unwrap_or(host);
        Some((plain, number(host)?))
    });
    in_place_of_host.or_else(|| {
        let (plain, end) = url.rsplit_once('@')?;
        Some((plain, number(end)?))
    })
}

/// Text with its `%xx` read; what is none stays.
fn unescaped(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut read, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(&byte) = bytes.get(at) {
        let digits = text.get(at + 1..at + 3).filter(|digits| byte == b'%' && !digits.starts_with('+'));
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        read.push(escaped.unwrap_or(byte));
        at += if escaped.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&read).into_owned()
}

/// Whether a reader of URLs takes a host for a number: digits of any script, or `0x` and those of base 16.
fn is_number(host: &str) -> bool {
    let of_sixteen = host.strip_prefix("0x").or_else(|| host.strip_prefix("0X"));
    match of_sixteen {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => !host.is_empty() && host.chars().all(char::is_numeric),
    }
}

/// Check a rank that a client asked for, as it is written in the request, against the number of ranks that there are.
/// None is no wish.
///
/// # Errors
/// The wish is no whole number, is negative or beyond the last rank.
pub fn check_wish(name: &str, wish: Option<&str>, ranks: usize) -> Result<(), String> {
    match wish {
        Some(wish) if !wish.parse().is_ok_and(|rank: usize| rank < ranks) => Err(format!(
            "{name} is {}, outside of 0 to {} of this deployment",
            wish.chars().take(100).collect::<String>(),
            ranks.saturating_sub(1)
        )),
        _ => Ok(()),
    }
}

/// The rank that a leg is sent to, or None where the worker has only one and the engine needs no word of it.
pub fn sent(rank: Option<usize>, size: Option<usize>) -> Option<usize> {
    rank.filter(|_| size.is_some_and(|size| size > 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_is_the_number_after_the_last_at_sign() {
        assert_eq!(split("http://127.0.0.1:8000@3"), ("http://127.0.0.1:8000", Some(3)));
        assert_eq!(split("http://[::1]:8080@0"), ("http://[::1]:8080", Some(0)));
        assert_eq!(split("http://user@host:1@12"), ("http://user@host:1", Some(12)));
    }

    #[test]
    fn a_name_without_a_rank_stays_whole() {
        for name in [
            "http://h:1",
            "http://user@host:8000",
            "http://h:1@two",
            "http://h:1@-1",
            "http://h:1@+1",
            "",
            "@x",
        ] {
            assert_eq!(split(name), (name, None), "{name}");
        }
    }

    #[test]
    fn an_empty_rank_or_one_beyond_all_numbers_is_no_rank() {
        for name in ["http://h:1@", "http://h:1@99999999999999999999999"] {
            assert_eq!(split(name), (name, None), "{name}");
        }
    }

    #[test]
    fn taking_the_rank_off_leaves_the_url() {
        assert_eq!(without_rank("http://127.0.0.1:8000@3"), "http://127.0.0.1:8000");
        assert_eq!(without_rank("http://127.0.0.1:8000"), "http://127.0.0.1:8000");
    }

    #[test]
    fn an_operators_url_with_a_rank_is_refused_with_what_to_write_instead() {
        let error = refuse_rank("http://127.0.0.1:8000@3").unwrap_err();
        assert!(
            error.contains("@3") && error.contains("give http://127.0.0.1:8000 and"),
            "{error}"
        );
        assert_eq!(refuse_rank("http://user@host:8000"), Ok(()));
    }

    #[test]
    fn a_rank_is_refused_whatever_stands_behind_it() {
        for behind in [
            "@2/",
            "@2?x",
            "@2#x",
            "@2\\x",
            "@2:80",
            "@2:80/x",
            "@2:",
            "@2/@x",
            "@2 ",
            "@2\n",
            "@2\t/",
            "@2.",
            "@2./",
            "@02",
            "/@2",
            "/@2 ",
            "@99999999999999999999999",
            "@0x2",
            "@0X1f/",
            "@0x",
            "@%32",
            "@%30%78%32/x",
            "@\u{ff12}",
            "@2\u{3002}/",
            "@%\t32",
            "@0\t2/",
        ] {
            for url in ["http://h:1", "https://[::1]:8080", "h:1", " http://user@h:1"] {
                let error = refuse_rank(&format!("{url}{behind}")).unwrap_err();
                assert!(error.contains(&format!("; give {}", url.trim())), "{error}");
            }
        }
    }

    #[test]
    fn a_rank_is_refused_whatever_stands_before_the_host() {
        for before in ["http:///", "http:////", "http:/", "http:", "http:\\\\", "//", "http:/\t/", "HTTP:\n//"] {
            for behind in ["@2", "@2/", "@2/x@y", "@0x2?x"] {
                let url = format!("{before}h:1{behind}");
                let error = refuse_rank(&url).unwrap_err();
                assert!(error.contains(&format!("; give {before}h:1 ")), "{error}");
            }
        }
    }

    #[test]
    fn an_escape_is_read_and_what_is_none_stays() {
        for (text, read) in [
            ("%32", "2"),
            ("a%2Fb%2f", "a/b/"),
            ("%", "%"),
            ("%3", "%3"),
            ("%3g", "%3g"),
            ("%+3", "%+3"),
            ("%%32", "%2"),
            ("%e2%82%ac", "\u{20ac}"),
            ("\u{20ac}%4", "\u{20ac}%4"),
        ] {
            assert_eq!(unescaped(text), read, "{text}");
        }
    }

    #[test]
    fn a_host_that_is_no_number_and_a_sign_in_a_path_are_no_rank() {
        for url in [
            "http://user:8000@127.0.0.1:80/",
            "http://h:1/",
            "http://h:1/@2/x",
            "http://h:1/x@y",
            "http://u@2.example:1/",
            "http://u@[::1]:1/",
            "http://h:1@",
            "http://h:1@/",
            "http://h:1@./",
            "http://u@%/",
            "http://u@2%2e1:1/",
            "http:///h:1/@2/x",
            "http:/h:1/x@y/",
            "http://h:1/?q=a@5:x",
            "h/x:y@2/",
            "",
        ] {
            assert_eq!(refuse_rank(url), Ok(()), "{url}");
        }
    }

    #[test]
    fn a_number_is_digits_or_a_prefix_and_digits_of_base_16() {
        for host in ["0", "12", "0x", "0xfF", "0X1", "\u{ff12}", "\u{0664}2"] {
            assert!(is_number(host), "{host}");
        }
        for host in ["", "0xg", "x2", "1a", "a", "-1", "0x0x1", "1 "] {
            assert!(!is_number(host), "{host}");
        }
    }

    #[test]
    fn a_wish_outside_of_the_ranks_or_that_is_no_whole_number_is_refused() {
        for wish in [
            "-1",
            "4",
            "9223372036854775807",
            "99999999999999999999999",
            "1.0",
            "\"1\"",
            "[0]",
            "true",
            "",
        ] {
            let error = check_wish("routed_dp_rank", Some(wish), 4).unwrap_err();
            assert!(
                error.contains(&format!("routed_dp_rank is {wish},")) && error.contains("0 to 3"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_long_wish_is_told_by_its_beginning() {
        assert!(check_wish("r", Some(&"\u{e9}".repeat(5000)), 4).unwrap_err().len() < 400);
    }

    #[test]
    fn a_wish_inside_and_no_wish_are_fine() {
        for wish in [None, Some("0"), Some("3")] {
            assert_eq!(check_wish("routed_dp_rank", wish, 4), Ok(()));
        }
    }

    #[test]
    fn no_ranks_at_all_refuse_any_wish_without_a_panic() {
        assert!(check_wish("r", Some("0"), 0).is_err());
    }

    #[test]
    fn a_worker_of_one_rank_is_sent_none() {
        assert_eq!(sent(Some(0), Some(1)), None);
        assert_eq!(sent(Some(2), Some(4)), Some(2));
        assert_eq!(sent(Some(0), Some(4)), Some(0));
        assert_eq!(sent(None, None), None);
        assert_eq!(sent(Some(1), None), None);
    }
}
