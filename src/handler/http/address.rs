//! Which addresses a handler may reach. Link-local ones, where clouds keep their metadata, only when the URL names them
//! itself; private ones as the operator allows.

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use url::{Host, Url};

/// Resolves names and leaves out what may not be reached: a name must not lead where its owner was not meant to lead us.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resolver {
    pub(super) allow_private: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("{name} leads only to addresses that are not allowed: {addresses}")]
struct NotAllowed {
    name: String,
    addresses: String,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (name, allow_private) = (name.as_str().to_owned(), self.allow_private);
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let allowed: Vec<SocketAddr> =
                found.iter().copied().filter(|address| may_be_reached(address.ip(), allow_private)).collect();
            if allowed.is_empty() {
                let addresses: Vec<String> = found.iter().map(|address| address.ip().to_string()).collect();
                return Err(NotAllowed { name, addresses: addresses.join(", ") }.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

fn may_be_reached(ip: IpAddr, allow_private: bool) -> bool {
    match kind(ip) {
        Kind::Never => false,
        Kind::Private => allow_private,
        Kind::Public => true,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Public,
    Private,
    /// Link-local, metadata, multicast, nowhere.
    Never,
}

fn kind(ip: IpAddr) -> Kind {
    match ip.to_canonical() {
        IpAddr::V4(ip) => kind_v4(ip),
        IpAddr::V6(ip) => kind_v6(ip),
    }
}

fn kind_v4(ip: Ipv4Addr) -> Kind {
    let [a, b, ..] = ip.octets();
    let shared = a == 100 && (64..128).contains(&b);
    if ip.is_link_local() || ip.is_multicast() || ip.is_broadcast() || a == 0 || a >= 240 {
        Kind::Never
    } else if ip.is_private() || ip.is_loopback() || shared {
        // Alibaba's metadata are at an address of the shared range.
        if ip == Ipv4Addr::new(100, 100, 100, 200) { Kind::Never } else { Kind::Private }
    } else {
        Kind::Public
    }
}

/// Amazon's metadata, which are not at a link-local address.
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

fn kind_v6(ip: Ipv6Addr) -> Kind {
    if let Some(behind) = behind_v6(ip) {
        return kind_v4(behind);
    }
    let [a, b, c, ..] = ip.segments();
    // The network's own translator, whatever is behind it; and the site-local addresses of before.
    let (own_nat64, site_local) = ((a, b, c) == (0x64, 0xff9b, 1), a & 0xffc0 == 0xfec0);
    let teredo = (a, b) == (0x2001, 0);
    if ip.is_unicast_link_local() || ip.is_multicast() || ip.is_unspecified() || ip == METADATA_V6 || teredo {
        Kind::Never
    } else if ip.is_unique_local() || ip.is_loopback() || own_nat64 || site_local {
        Kind::Private
    } else {
        Kind::Public
    }
}

/// The IPv4 address that a translator or a tunnel leads to: NAT64, 6to4, or the form that has only zeros before it.
fn behind_v6(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let [.., six, seven] = ip.segments();
    match ip.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some((high, low)),
        [0x2002, high, low, ..] => Some((high, low)),
        // Neither unspecified nor loopback.
        [0, 0, 0, 0, 0, 0, ..] if six > 0 => Some((six, seven)),
        _ => None,
    }
    .map(|(high, low)| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)))
}

/// What is wrong with a URL. Addresses that it names itself do not pass the resolver.
pub(super) fn complaints(url: &Url, allow_private: bool) -> Vec<String> {
    let mut complaints = Vec::new();
    if !matches!(url.scheme(), "http" | "https") {
        complaints.push("must begin with http:// or https://".to_owned());
    }
    if !url.username().is_empty() || url.password().is_some() {
        complaints.push("must hold no user and password: use bearer_token or headers".to_owned());
    }
    let literal = match url.host() {
        Some(Host::Ipv4(ip)) => Some(IpAddr::V4(ip)),
        Some(Host::Ipv6(ip)) => Some(IpAddr::V6(ip)),
        Some(Host::Domain(_)) => None,
        None => {
            complaints.push("must name a host".to_owned());
            None
        }
    };
    if !allow_private && literal.is_some_and(|ip| kind(ip) != Kind::Public) {
        complaints.push("is no public address, and allow_private is false".to_owned());
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_sorted_into_three_kinds() {
        let cases = [
            ("8.8.8.8", Kind::Public),
            ("10.1.2.3", Kind::Private),
            ("127.0.0.1", Kind::Private),
            ("100.64.0.1", Kind::Private),
            ("169.254.169.254", Kind::Never),
            ("::ffff:169.254.169.254", Kind::Never),
            ("100.100.100.200", Kind::Never),
            ("0.0.0.0", Kind::Never),
            ("255.255.255.255", Kind::Never),
            ("::1", Kind::Private),
            ("fd00::1", Kind::Private),
            ("fd00:ec2::254", Kind::Never),
            ("fe80::1", Kind::Never),
            ("2606:4700::1", Kind::Public),
            ("64:ff9b::8.8.8.8", Kind::Public),
            ("64:ff9b::10.0.0.1", Kind::Private),
            ("64:ff9b::169.254.169.254", Kind::Never),
            ("64:ff9b:1::8.8.8.8", Kind::Private),
            ("2002:808:808::1", Kind::Public),
            ("2002:a00:1::1", Kind::Private),
            ("2002:a9fe:a9fe::1", Kind::Never),
            ("::7f00:1", Kind::Private),
            ("::", Kind::Never),
            ("fec0::1", Kind::Private),
            ("2001:0:4136:e378:8000:63bf:3fff:fdd2", Kind::Never),
        ];
        for (ip, expected) in cases {
            assert_eq!(kind(ip.parse().unwrap()), expected, "{ip}");
        }
    }

    #[test]
    fn a_url_that_cannot_be_meant_is_refused() {
        let of = |url: &str, private| complaints(&Url::parse(url).unwrap(), private).len();
        assert_eq!(of("http://127.0.0.1:8080/x", true), 0);
        assert_eq!(of("http://127.0.0.1:8080/x", false), 1);
        assert_eq!(of("http://169.254.169.254/x", true), 0, "named literally");
        assert_eq!(of("http://169.254.169.254/x", false), 1);
        assert_eq!(of("http://[fe80::1]/x", false), 1);
        assert_eq!(of("http://[64:ff9b::a9fe:a9fe]/x", false), 1);
        assert_eq!(of("ftp://u:p@example.org/", true), 2);
    }

    #[tokio::test]
    async fn a_name_that_leads_to_this_machine_is_private() {
        let name = || "localhost".parse::<Name>().unwrap();
        assert!(Resolver { allow_private: false }.resolve(name()).await.is_err());
        let found: Vec<SocketAddr> =
            Resolver { allow_private: true }.resolve(name()).await.ok().unwrap().collect();
        assert!(!found.is_empty());
    }
}
