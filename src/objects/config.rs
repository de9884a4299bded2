//! `[outputs]`: where files go. What can be seen to be wrong without asking a server is reported here.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use url::Url;

use super::key;
use crate::secret::Secret;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where output files go: `file`, a directory every worker can see, or `s3`.
    pub store: Kind,
    /// The directory of the `file` store; made when the first file is written.
    pub dir: PathBuf,
    pub s3: S3Config,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    File,
    S3,
}

/// `[outputs.s3]`, read only with `store = "s3"`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct S3Config {
    /// The server's address, such as `https://minio.example:9000`; empty means AWS.
    pub endpoint: String,
    /// The region requests are signed for; for AWS also where they are sent.
    pub region: String,
    /// The bucket. It must exist.
    pub bucket: String,
    /// Put in front of every key, so that a bucket can be shared; may be empty.
    pub prefix: String,
    /// The access key id; empty means `AWS_ACCESS_KEY_ID` (with `AWS_SESSION_TOKEN`, if set).
    pub access_key: Secret,
    /// The secret key; empty means `AWS_SECRET_ACCESS_KEY`.
    pub secret_key: Secret,
    /// `endpoint/bucket/key` rather than `bucket.endpoint/key`. Unless set: yes with an endpoint of your
    /// own, or a bucket with a dot in its name (no certificate covers that as a host), else no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_style: Option<bool>,
    /// PEM file of certificate authorities to trust beside the system's; empty means none.
    pub ca_file: PathBuf,
    /// The longest a request of at most one part (8 MiB) may take, and the longest silence in a download.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self { store: Kind::File, dir: "outputs".into(), s3: S3Config::default() }
    }
}

impl Default for S3Config {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            region: "us-east-1".into(),
            bucket: String::new(),
            prefix: String::new(),
            access_key: Secret::default(),
            secret_key: Secret::default(),
            path_style: None,
            ca_file: PathBuf::new(),
            timeout: Duration::from_secs(60),
        }
    }
}

impl Config {
    /// Where files go, for people.
    pub fn describe(&self) -> String {
        match self.store {
            Kind::File => self.dir.display().to_string(),
            Kind::S3 => format!("s3://{}/{}", self.s3.bucket, self.s3.prefix),
        }
    }

    /// Every problem as (key, what is wrong and what to do).
    pub fn check(&self) -> Vec<(&'static str, String)> {
        match self.store {
            Kind::File if self.dir.as_os_str().is_empty() => {
                vec![("outputs.dir", "is empty: name a directory".into())]
            }
            Kind::File => Vec::new(),
            Kind::S3 => self.s3.check(),
        }
    }
}

impl S3Config {
    pub(super) fn path_style(&self) -> bool {
        self.path_style.unwrap_or(!self.endpoint.is_empty() || self.bucket.contains('.'))
    }

    fn check(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        if let Some(problem) = bucket_problem(&self.bucket) {
            problems.push(("outputs.s3.bucket", problem.to_owned()));
        }
        if self.region.trim().is_empty() {
            problems.push(("outputs.s3.region", "is empty: us-east-1 serves most servers but AWS".into()));
        }
        if let Some(problem) = endpoint_problem(&self.endpoint) {
            problems.push(("outputs.s3.endpoint", problem));
        }
        if let Some(problem) = prefix_problem(&self.prefix) {
            problems.push(("outputs.s3.prefix", problem));
        }
        if self.access_key.is_empty() != self.secret_key.is_empty() {
            let (missing, other) = match self.access_key.is_empty() {
                true => ("outputs.s3.access_key", "secret_key"),
                false => ("outputs.s3.secret_key", "access_key"),
            };
            problems.push((missing, format!("is empty but {other} is set: give both or neither")));
        }
        if self.timeout < Duration::from_secs(1) {
            problems.push(("outputs.s3.timeout", "is under a second: 60s suits most networks".into()));
        }
        problems
    }
}

fn bucket_problem(bucket: &str) -> Option<&'static str> {
    // Wider than AWS's rule for new buckets: old ones and other servers know capitals and underscores.
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    match bucket {
        "" => Some("is empty: name the bucket"),
        "." | ".." => Some("is not a bucket's name"),
        _ if bucket.chars().all(plain) => None,
        _ => Some("is not a bucket's name: letters, digits, dots, hyphens and underscores only"),
    }
}

fn endpoint_problem(endpoint: &str) -> Option<String> {
    if endpoint.is_empty() {
        return None;
    }
    let url = match Url::parse(endpoint) {
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => url,
        // What was given is not repeated: it may hold a password.
        _ => return Some("is not an address: write it as https://host or http://host:port".into()),
    };
    if !url.username().is_empty() || url.password().is_some() {
        return Some("has a user or password: those belong in access_key and secret_key".into());
    }
    (url.query().is_some() || url.fragment().is_some()).then(|| "has a query or fragment: remove it".into())
}

fn prefix_problem(prefix: &str) -> Option<String> {
    let prefix = prefix.trim_matches('/');
    match key::problem(prefix) {
        _ if prefix.is_empty() => None,
        _ if prefix.len() > 250 => Some("is longer than 250 bytes".into()),
        problem => problem.map(|problem| format!("cannot be used: {problem}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(config: &Config) -> Vec<&'static str> {
        config.check().into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn the_defaults_are_a_directory_and_have_no_problem() {
        let config: Config = toml::from_str("").unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.dir, PathBuf::from("outputs"));
        assert!(config.check().is_empty());
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let config: Config = toml::from_str(
            "store = 's3'\n[s3]\nendpoint = 'minio:9000'\nregion = ''\nbucket = 'a/b'\nprefix = 'x/../y'\n\
             access_key = 'AK'\ntimeout = '10ms'",
        )
        .unwrap();
        let expected = [
            "outputs.s3.bucket",
            "outputs.s3.region",
            "outputs.s3.endpoint",
            "outputs.s3.prefix",
            "outputs.s3.secret_key",
            "outputs.s3.timeout",
        ];
        assert_eq!(keys(&config), expected);
    }

    #[test]
    fn unknown_keys_are_refused_and_a_password_in_the_endpoint_is_not_repeated() {
        assert!(toml::from_str::<Config>("[s3]\nbukket = 'a'").is_err());
        let s3 = S3Config { endpoint: "https://me:canary@host".into(), ..S3Config::default() };
        let problems = Config { store: Kind::S3, s3, ..Config::default() }.check();
        assert!(problems.iter().any(|(key, _)| *key == "outputs.s3.endpoint"));
        assert!(!format!("{problems:?}").contains("canary"));
    }

    #[test]
    fn path_style_follows_the_endpoint_unless_set() {
        let own = S3Config { endpoint: "http://h".into(), ..S3Config::default() };
        assert!(own.path_style());
        assert!(!S3Config { path_style: Some(false), ..own }.path_style());
        assert!(!S3Config { bucket: "plain".into(), ..S3Config::default() }.path_style());
        assert!(S3Config { bucket: "with.dot".into(), ..S3Config::default() }.path_style());
    }
}
