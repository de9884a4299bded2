//! TLS on the port: health, metrics and API by one certificate, which may change.

use std::path::Path;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;
use crate::suite::support::wait::{SOON, eventually};

/// Puts a new certificate in its place; a client that trusts no other.
fn certify(dir: &Path) -> reqwest::Client {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(dir.join("tls.crt"), made.cert.pem()).unwrap();
    std::fs::write(dir.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
    let root = reqwest::Certificate::from_pem(made.cert.pem().as_bytes()).unwrap();
    let client = reqwest::Client::builder().tls_built_in_root_certs(false).add_root_certificate(root);
    client.no_proxy().pool_max_idle_per_host(0).build().unwrap()
}

async fn status(client: &reqwest::Client, url: &str) -> Option<u16> {
    client.get(url).send().await.ok().map(|answer| answer.status().as_u16())
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_answered_by_tls_and_with_a_new_certificate_when_there_is_one() {
    // Another test may have been first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (db, dir) = (TestDb::new().await, run::new_dir("tls"));
    let client = certify(&dir);
    let file = |name: &str| dir.join(name).display().to_string();
    let toml = format!(
        "[http]\nrate_limit = 0\ntls_cert_file = {:?}\ntls_key_file = {:?}",
        file("tls.crt"),
        file("tls.key")
    );
    let daemon = Daemon::builder(&db, &toml).start();
    let at = |path: &str| format!("https://localhost:{}{path}", daemon.config().http_port());
    eventually(SOON, "it is ready", async || (status(&client, &at("/readyz")).await? == 200).then_some(()))
        .await;
    for path in ["/livez", "/metrics", "/v1/openapi.json"] {
        assert_eq!(status(&client, &at(path)).await, Some(200), "{path}");
    }
    assert!(daemon.get("/livez").await.is_err(), "nothing is said in plain text");

    let newer = certify(&dir);
    eventually(SOON, "the new certificate is shown", async || {
        (status(&newer, &at("/livez")).await? == 200).then_some(())
    })
    .await;
    assert_eq!(status(&client, &at("/livez")).await, None, "and the old one no more");

    // A key that does not fit changes nothing.
    std::fs::write(dir.join("tls.key"), "no key").unwrap();
    eventually(SOON, "it is told", async || {
        assert_eq!(status(&newer, &at("/livez")).await, Some(200));
        daemon
            .log()
            .iter()
            .any(|line| line.contains("changed secrets or certificates cannot be used"))
            .then_some(())
    })
    .await;
}
