//! Gates: the environment switches of the router's patches, all off by default.
//!
//! A gate is read once, at start-up, so that a running router never changes its mind half way. A value that is neither
//! on nor off stops the start: an operator who wrote `yes please` must not run for weeks without the patch.
//!
//! Standard library only, so that `rustc --test` runs the tests below without any crate.

use std::{env, ffi::OsString};

/// What was built in: the mark that the build puts here names the series by its digest and its number of patches.
pub const SERIES: &str = match option_env!("PATCHBUNDLE_ROUTER_SERIES") {
    Some(mark) => mark,
    None => "(built without a series mark)",
};

/// Where a gate of PD mode was set: what the router was started as.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    /// The router splits prefill and decode (or makes its routers as workers come, IGW).
    pub pd: bool,
    /// It talks HTTP to its workers, not gRPC.
    pub http: bool,
}

/// Tell whether the word `value` of the gate `name` is on; empty means off.
///
/// # Errors
/// The value is neither an on word nor an off word.
pub fn parse_flag(name: &str, value: &str) -> Result<bool, String> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "" | "0" | "false" | "no" | "off" => Ok(false),
        _ => Err(format!(
            "{name}={value:?} is neither on (1, true, yes, on) nor off (0, false, no, off, unset)"
        )),
    }
}

/// The variable `name` as text; unset reads as empty.
///
/// # Errors
/// The value is not UTF-8.
pub fn text(name: &str) -> Result<String, String> {
    decode(name, env::var_os(name))
}

fn decode(name: &str, value: Option<OsString>) -> Result<String, String> {
    value
        .unwrap_or_default()
        .into_string()
        .map_err(|raw| format!("{name}={raw:?} is not UTF-8 text"))
}

/// Read the gate `name` from the environment and check that it is set where it means something.
///
/// # Errors
/// The value is malformed, or the gate is on in a topology that it was not made for.
pub fn read_flag(name: &str, topology: Topology) -> Result<bool, String> {
    let on = parse_flag(name, &text(name)?)?;
    fits(name, on, topology).map(|()| on)
}

/// Refuse a gate that is on where its patch does nothing.
///
/// # Errors
/// Says which condition failed.
pub fn fits(name: &str, on: bool, topology: Topology) -> Result<(), String> {
    if on && !topology.pd {
        return Err(format!(
            "{name} is on but the router is not in prefill/decode mode (--pd-disaggregation)"
        ));
    }
    if on && !topology.http {
        return Err(format!(
            "{name} is on but the workers are reached by gRPC; it is made for HTTP workers only"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PD: Topology = Topology { pd: true, http: true };

    #[test]
    fn the_on_words_are_on_in_any_case_and_with_blanks_around() {
        for word in ["1", "true", "TRUE", "yes", "on", " On "] {
            assert_eq!(parse_flag("G", word), Ok(true), "{word:?}");
        }
    }

    #[test]
    fn the_off_words_and_nothing_are_off() {
        for word in ["", " ", "0", "false", "False", "no", "off"] {
            assert_eq!(parse_flag("G", word), Ok(false), "{word:?}");
        }
    }

    #[test]
    fn anything_else_is_an_error_that_names_the_variable_and_the_value() {
        for word in ["2", "01", "y", "enable", "1;", "tru e", "-1"] {
            let error = parse_flag("SMG_PD_X", word).unwrap_err();
            assert!(error.contains("SMG_PD_X") && error.contains(word), "{error}");
        }
    }

    #[test]
    fn an_unset_variable_reads_as_empty() {
        assert_eq!(decode("G", None), Ok(String::new()));
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_not_utf8_is_an_error() {
        use std::os::unix::ffi::OsStringExt;
        let error = decode("SMG_PD_X", Some(OsString::from_vec(vec![0x31, 0xff]))).unwrap_err();
        assert!(error.contains("SMG_PD_X") && error.contains("UTF-8"), "{error}");
    }

    #[test]
    fn a_gate_outside_of_pd_mode_is_refused_and_off_is_fine_anywhere() {
        let regular = Topology { pd: false, http: true };
        assert!(fits("G", true, regular).unwrap_err().contains("--pd-disaggregation"));
        assert_eq!(fits("G", false, regular), Ok(()));
        assert_eq!(fits("G", true, PD), Ok(()));
    }

    #[test]
    fn a_gate_over_grpc_workers_is_refused() {
        let grpc = Topology { pd: true, http: false };
        assert!(fits("G", true, grpc).unwrap_err().contains("gRPC"));
        assert_eq!(fits("G", false, grpc), Ok(()));
    }

    #[test]
    fn a_gate_that_is_not_set_reads_as_off() {
        assert_eq!(read_flag("SMG_PD_THIS_IS_SET_NOWHERE", PD), Ok(false));
    }

    #[test]
    fn a_gate_that_is_read_is_checked_against_the_topology() {
        let name = "SMG_PD_THIS_IS_SET_BY_ONE_TEST";
        env::set_var(name, "1");
        assert_eq!(read_flag(name, PD), Ok(true));
        let regular = Topology { pd: false, http: true };
        assert!(read_flag(name, regular).unwrap_err().contains(name));
    }
}
