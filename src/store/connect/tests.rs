//! Connection strings, as a table: what is written, what is understood, what is refused, and what never shows.

use std::error::Error;
use std::time::Duration;

use tokio_postgres::config::{SslMode as DriverMode, SslNegotiation, TargetSessionAttrs};

use super::tls::{Roots, SslMode};
use super::*;

fn parse(text: &str) -> Target {
    Target::parse(text).unwrap_or_else(|error| panic!("{text}: {error} {:?}", error.source()))
}

#[test]
fn both_forms_name_hosts_user_and_database() {
    let table = [
        ("postgres://localhost/musterd", "localhost:5432, database musterd"),
        ("postgresql://u:p@db:6000/m", "db:6000, database m, user u"),
        ("host=db port=6000 user=u password=p dbname=m", "db:6000, database m, user u"),
        ("postgres://u@a:1,b,c:3/m", "a:1,b:5432,c:3, database m, user u"),
        ("host=a,b port=7 dbname=m", "a:7,b:7, database m"),
        ("postgres://[::1]:6000/m", "[::1]:6000, database m"),
        ("postgres://%2Frun%2Fpg:6000/m", "/run/pg:6000, database m"),
        ("postgres:///m?host=/run/pg&port=6000", "/run/pg:6000, database m"),
        ("host = /run/pg  dbname = 'my db'", "/run/pg:5432, database my db"),
        (r"host=h dbname='it\'s' user=a\ b", "h:5432, database it's, user a b"),
        ("postgres://h/m%20x?user=u%40x", "h:5432, database m x, user u@x"),
        ("postgres://h/m?application_name=a@b/c", "h:5432, database m"),
        ("postgres://first/m?host=second", "second:5432, database m"),
        ("hostaddr=127.0.0.1 dbname=m", "127.0.0.1:5432, database m"),
    ];
    for (text, shown) in table {
        assert_eq!(parse(text).to_string(), shown, "{text}");
    }
}

#[test]
fn special_characters_of_a_password_survive_both_forms() {
    let url = parse("postgres://u:p%40%2F%3F'%5C%20x@h/d");
    let pairs = parse(r"host=h user=u dbname=d password='p@/?\'\\ x'");
    assert_eq!(url.driver.get_password(), Some(br"p@/?'\ x".as_slice()));
    assert_eq!(url, pairs);
}

#[test]
fn sslmode_is_libpqs() {
    let table = [
        ("", SslMode::Prefer, DriverMode::Prefer),
        ("sslmode=disable", SslMode::Disable, DriverMode::Disable),
        ("sslmode=allow", SslMode::Allow, DriverMode::Prefer),
        ("sslmode=prefer sslnegotiation=postgres", SslMode::Prefer, DriverMode::Prefer),
        ("sslmode=require", SslMode::Require, DriverMode::Require),
        ("ssl=true", SslMode::Require, DriverMode::Require),
        ("sslmode=verify-ca sslrootcert=ca.pem", SslMode::VerifyCa, DriverMode::Require),
        ("sslmode=verify-full", SslMode::VerifyFull, DriverMode::Require),
        ("sslrootcert=system", SslMode::VerifyFull, DriverMode::Require),
    ];
    for (text, ours, drivers) in table {
        let target = parse(&format!("host=h {text}"));
        assert_eq!((target.ssl_mode(), target.driver.get_ssl_mode()), (ours, drivers), "{text}");
        let reparsed: SslMode = ours.to_string().parse().unwrap();
        assert_eq!(reparsed, ours);
    }
}

#[test]
fn certificates_are_taken_out_before_the_driver_sees_them() {
    let target = parse("postgres://h/d?sslmode=verify-ca&sslrootcert=%2Fca.pem&sslcert=c.pem&sslkey=k.pem");
    assert_eq!(target.tls.roots, Some(Roots::File("/ca.pem".into())));
    let identity = target.tls.identity.unwrap();
    assert_eq!((identity.cert, identity.key), ("c.pem".into(), "k.pem".into()));
}

#[test]
fn a_unix_socket_needs_no_tls_whatever_the_mode() {
    let target = parse("host=/run/pg sslmode=verify-full");
    assert_eq!(target.driver.get_ssl_mode(), DriverMode::Disable);
}

#[test]
fn the_rest_reaches_the_driver() {
    let target = parse(
        "host=h application_name=mine connect_timeout=7 options='-c geqo=off' target_session_attrs=primary \
         tcp_user_timeout=1500 keepalives_count=9 sslmode=require sslnegotiation=direct",
    );
    let driver = &target.driver;
    assert_eq!(driver.get_application_name(), Some("mine"));
    assert_eq!(driver.get_connect_timeout(), Some(&Duration::from_secs(7)));
    assert_eq!(driver.get_options(), Some("-c geqo=off"));
    assert_eq!(driver.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    assert_eq!(driver.get_tcp_user_timeout(), Some(&Duration::from_millis(1500)));
    assert_eq!(driver.get_keepalives_retries(), Some(9));
    assert_eq!(driver.get_ssl_negotiation(), SslNegotiation::Direct);
    assert_eq!(target.driver("musterd").unwrap().0.get_application_name(), Some("mine"));
}

#[test]
fn what_is_not_said_is_bounded() {
    let target = parse("host=h connect_timeout=0");
    assert_eq!(target.driver.get_connect_timeout(), Some(&Duration::from_secs(5)));
    assert_eq!(target.driver.get_tcp_user_timeout(), Some(&Duration::from_secs(30)));
    assert_eq!(target.driver.get_keepalives_idle(), Duration::from_secs(30));
    assert_eq!(target.driver("musterd").unwrap().0.get_application_name(), Some("musterd"));
}

#[test]
fn what_is_refused_says_what_to_write() {
    let table = [
        ("", "postgres://user@host/database"),
        ("localhost/musterd", "key=value"),
        ("host='h", "close it"),
        ("postgres://u:can@ary@h/d", "%40"),
        ("postgres://u:1/can@ary/d", "%40"),
        ("postgres://u:1?canary@h/d", "%3F"),
        ("postgres://u:100%@h/d", "%25"),
        ("postgres://u:%00@h/d", "%25"),
        ("postgres://[::1/d", "[::1]:5432"),
        ("host=h sslmod=require", "did you mean sslmode?"),
        ("host=h password=my canary=x", "known are user"),
        ("mysql://u:canary@h/d?a=b", "known are user"),
        ("host=h sslmode=canary", "verify-full"),
        ("host=h sslmode=verify-ca", "sslrootcert"),
        ("host=h sslmode=require sslrootcert=system", "verify-full"),
        ("host=h sslcert=c.pem", "sslcert and sslkey together"),
        ("host=h sslnegotiation=direct", "sslmode=require"),
        ("host=/run,h sslmode=require", "either Unix sockets or TCP"),
        ("host=a,b,c port=1,2", "one for each host"),
        ("host=a,b hostaddr=127.0.0.1", "one address for each host"),
        ("host=h port=canary", "`port`"),
        ("host=h tcp_user_timeout=canary", "milliseconds"),
        ("host=h target_session_attrs=canary", "read-write"),
    ];
    for (text, advice) in table {
        let error = Target::parse(text).expect_err(text);
        let source = error.source().and_then(Error::source).map(ToString::to_string);
        let said = format!("{error} {}", source.unwrap_or_default());
        assert!(said.contains(advice), "{text:?}: {said}");
        assert!(!said.contains("canary") && !format!("{error:?}").contains("canary"), "{text:?}: {error:?}");
    }
}

#[test]
fn a_target_never_shows_its_password() {
    let target = parse("postgres://u:canary@h/d?options=-c%20x%3Dcanary");
    let shown = format!("{target} {target:?} {:?}", ConnectError::timeout(&target));
    assert!(!shown.contains("canary"), "{shown}");
    for part in ["h:5432", "\"u\"", "\"d\"", "Prefer"] {
        assert!(format!("{target:?}").contains(part), "{part} in {target:?}");
    }
}
