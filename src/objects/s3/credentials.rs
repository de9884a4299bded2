//! Credentials come from the config, else from the AWS variables of the environment, else opening fails.
//!
//! They are never looked for in files of a home directory or asked of a metadata service: a worker that writes with
//! another user's rights is worse than one that says it has none.

use s3::creds::Credentials;

use crate::objects::config::S3Config;
use crate::objects::error::ObjectError;
use crate::secret::Secret;

pub(super) fn find(
    config: &S3Config,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Credentials, ObjectError> {
    if !config.access_key.is_empty() {
        let now = |secret: &Secret| {
            secret.current().map_err(|error| ObjectError::config("outputs.s3.access_key", error))
        };
        let (access, secret) = (now(&config.access_key)?, now(&config.secret_key)?);
        return make(access.expose(), secret.expose(), None);
    }
    let set = |name| env(name).filter(|value| !value.is_empty());
    match (set("AWS_ACCESS_KEY_ID"), set("AWS_SECRET_ACCESS_KEY")) {
        (Some(access), Some(secret)) => make(&access, &secret, set("AWS_SESSION_TOKEN").as_deref()),
        _ => Err(ObjectError::NoCredentials),
    }
}

fn make(access: &str, secret: &str, session: Option<&str>) -> Result<Credentials, ObjectError> {
    Credentials::new(Some(access), Some(secret), None, session, None)
        .map_err(|error| ObjectError::config("outputs.s3.access_key", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        Some(format!("env {name}"))
    }

    #[test]
    fn the_config_comes_first_and_takes_nothing_from_the_environment() {
        let config = S3Config { access_key: "AK".into(), secret_key: "SK".into(), ..S3Config::default() };
        let found = find(&config, env).unwrap();
        assert_eq!((found.access_key.as_deref(), found.secret_key.as_deref()), (Some("AK"), Some("SK")));
        assert_eq!(found.session_token, None);
    }

    #[test]
    fn the_environment_comes_second_with_its_session() {
        let found = find(&S3Config::default(), env).unwrap();
        assert_eq!(found.access_key.as_deref(), Some("env AWS_ACCESS_KEY_ID"));
        assert_eq!(found.secret_key.as_deref(), Some("env AWS_SECRET_ACCESS_KEY"));
        assert_eq!(found.session_token.as_deref(), Some("env AWS_SESSION_TOKEN"));
    }

    #[test]
    fn without_either_opening_fails() {
        let half = |name: &str| (name == "AWS_ACCESS_KEY_ID").then(|| "AK".to_owned());
        for result in [find(&S3Config::default(), |_| None), find(&S3Config::default(), half)] {
            assert!(matches!(result, Err(ObjectError::NoCredentials)));
        }
    }
}
