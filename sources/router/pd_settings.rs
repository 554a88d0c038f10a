//! The settings of the strict acknowledgement, read and checked once at start-up.
//!
//! Standard library only, so that `rustc --test` runs the tests below without any crate.

use std::time::Duration;

use super::pd_gates::{fits, parse_flag, Topology};

/// The gate of the patch.
pub const GATE: &str = "SMG_PD_STRICT_ACK";
/// How long the prefill worker may take for its acknowledgement, in milliseconds; 0 is as long as any request.
pub const TIMEOUT: &str = "SMG_PD_ACK_TIMEOUT_MS";
/// The most bytes of an acknowledgement that are kept where they are needed (for log probabilities).
pub const MAX_BYTES: &str = "SMG_PD_ACK_MAX_BYTES";
/// Whether a failure that the prefill worker has reported may be tried again like any other.
pub const RETRY: &str = "SMG_PD_ACK_RETRY";

const DAY_MS: u64 = 24 * 60 * 60 * 1000;
const DEFAULT_BYTES: u64 = 64 << 20;

/// What the patch was set to, when it is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// None: no deadline of its own.
    pub timeout: Option<Duration>,
    pub max_bytes: usize,
    pub retry: bool,
}

/// Read all settings with `read`, which gives an empty text for what is unset; None while the gate is off.
///
/// # Errors
/// A value is malformed or out of range, the gate is on outside of HTTP PD mode, or a setting is there without its gate.
pub fn settings(read: impl Fn(&str) -> Result<String, String>, topology: Topology) -> Result<Option<Settings>, String> {
    let on = parse_flag(GATE, &read(GATE)?)?;
    fits(GATE, on, topology)?;
    let timeout = number(TIMEOUT, &read(TIMEOUT)?, 0, 0, DAY_MS)?;
    let max_bytes = number(MAX_BYTES, &read(MAX_BYTES)?, DEFAULT_BYTES, 1024, 1 << 32)?;
    let retry = parse_flag(RETRY, &read(RETRY)?)?;
    if on {
        let max_bytes = usize::try_from(max_bytes).map_err(|error| format!("{MAX_BYTES}: {error}"))?;
        let timeout = Some(timeout).filter(|&ms| ms > 0).map(Duration::from_millis);
        return Ok(Some(Settings {
            timeout,
            max_bytes,
            retry,
        }));
    }
    for name in [TIMEOUT, MAX_BYTES, RETRY] {
        if !read(name)?.trim().is_empty() {
            return Err(format!("{name} is set but {GATE} is off, so it would do nothing"));
        }
    }
    Ok(None)
}

fn number(name: &str, text: &str, default: u64, least: u64, most: u64) -> Result<u64, String> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(default);
    }
    let value = Some(text)
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|text| text.parse().ok());
    value
        .filter(|value| (least..=most).contains(value))
        .ok_or_else(|| format!("{name}={text:?} is no whole number from {least} to {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PD: Topology = Topology { pd: true, http: true };

    fn with(values: &[(&str, &str)]) -> Result<Option<Settings>, String> {
        with_in(values, PD)
    }

    fn with_in(values: &[(&str, &str)], topology: Topology) -> Result<Option<Settings>, String> {
        let read = |name: &str| {
            Ok(values
                .iter()
                .find(|(known, _)| *known == name)
                .map_or(String::new(), |(_, value)| value.to_string()))
        };
        settings(read, topology)
    }

    #[test]
    fn nothing_set_is_off() {
        assert_eq!(with(&[]), Ok(None));
        assert_eq!(with(&[(GATE, "0")]), Ok(None));
    }

    #[test]
    fn the_gate_alone_gives_the_defaults() {
        let defaults = Settings {
            timeout: None,
            max_bytes: 64 << 20,
            retry: false,
        };
        assert_eq!(with(&[(GATE, "1")]), Ok(Some(defaults)));
        assert_eq!(
            with(&[(GATE, "1"), (TIMEOUT, "0"), (RETRY, "no"), (MAX_BYTES, "")]),
            Ok(Some(defaults))
        );
    }

    #[test]
    fn every_setting_is_taken() {
        let found = with(&[(GATE, "on"), (TIMEOUT, " 1500 "), (MAX_BYTES, "1024"), (RETRY, "1")]);
        let wanted = Settings {
            timeout: Some(Duration::from_millis(1500)),
            max_bytes: 1024,
            retry: true,
        };
        assert_eq!(found, Ok(Some(wanted)));
    }

    #[test]
    fn a_malformed_value_is_an_error_that_names_it_whether_the_gate_is_on_or_not() {
        for gate in ["0", "1"] {
            for (name, value) in [
                (TIMEOUT, "1s"),
                (TIMEOUT, "-1"),
                (TIMEOUT, "+1"),
                (TIMEOUT, "1.5"),
                (TIMEOUT, "86400001"),
                (TIMEOUT, "99999999999999999999999"),
                (MAX_BYTES, "1023"),
                (MAX_BYTES, "0"),
                (MAX_BYTES, "4294967297"),
                (MAX_BYTES, "64M"),
                (RETRY, "2"),
            ] {
                let error = with(&[(GATE, gate), (name, value)]).unwrap_err();
                assert!(error.contains(name) && error.contains(value), "{error}");
            }
        }
        assert!(with(&[(GATE, "maybe")]).unwrap_err().contains(GATE));
    }

    #[test]
    fn the_limits_themselves_are_allowed() {
        for (name, value) in [(TIMEOUT, "86400000"), (TIMEOUT, "1"), (MAX_BYTES, "4294967296")] {
            assert!(with(&[(GATE, "1"), (name, value)]).is_ok(), "{name}={value}");
        }
    }

    #[test]
    fn a_setting_without_its_gate_is_refused() {
        for (name, value) in [(TIMEOUT, "1000"), (MAX_BYTES, "4096"), (RETRY, "1"), (RETRY, "0")] {
            let error = with(&[(name, value)]).unwrap_err();
            assert!(error.contains(name) && error.contains(GATE), "{error}");
            assert_eq!(with(&[(name, "  ")]), Ok(None), "blanks are nothing");
        }
    }

    #[test]
    fn the_gate_outside_of_its_topology_is_refused() {
        for topology in [Topology { pd: false, http: true }, Topology { pd: true, http: false }] {
            assert!(with_in(&[(GATE, "1")], topology).unwrap_err().contains(GATE));
            assert_eq!(with_in(&[], topology), Ok(None));
        }
    }
}
