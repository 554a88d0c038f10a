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
/// has its host, whatever is behind that. A reader of URLs takes such a number for an address and leaves out the blanks
/// around a URL, line ends and tabs in it, and a dot at the end of its host.
fn rank_in(url: &str) -> Option<(&str, String)> {
    let url = url.trim();
    let behind = url.split_once("://").map_or(url, |(_, behind)| behind);
    let path = behind.trim_start_matches(|one| !matches!(one, '/' | '\\' | '?' | '#'));
    let named = url.strip_suffix(path).unwrap_or(url);
    [named, url].into_iter().find_map(|text| {
        let (plain, host) = text.rsplit_once('@')?;
        let host = host.split(':').next().unwrap_or(host);
        let host = host.replace(['\t', '\n', '\r'], "");
        let rank = host.strip_suffix('.').unwrap_or(&host);
        let number = !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit());
        number.then(|| (plain, rank.to_string()))
    })
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
        ] {
            for url in ["http://h:1", "https://[::1]:8080", "h:1", " http://user@h:1"] {
                let error = refuse_rank(&format!("{url}{behind}")).unwrap_err();
                assert!(error.contains(&format!("; give {}", url.trim())), "{error}");
            }
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
            "",
        ] {
            assert_eq!(refuse_rank(url), Ok(()), "{url}");
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
