//! Which names and addresses are this machine's own: what is sent there crosses no network.

use std::net::IpAddr;

/// Whether a host, without its port, is this machine.
pub fn is_loopback(host: &str) -> bool {
    let host = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_its_own() {
        for host in ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "[::1]", "::1", "::ffff:127.0.0.1"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in
            ["", "rebind.example", "localhost.example", "10.0.0.1", "127.0.0.1.example", "2001:db8::1"]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
