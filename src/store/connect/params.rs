//! A connection string, in either of libpq's forms, is a list of keys and values.
//!
//! Errors name the place, never the text: a mistyped password must not end up in a log.

use std::iter::Peekable;
use std::str::Chars;

use super::ParseError;

/// The parameters of a connection string; of two values for one key the later one counts.
#[derive(Default)]
pub(super) struct Params(Vec<(String, String)>);

impl Params {
    pub(super) fn read(text: &str) -> Result<Self, ParseError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(ParseError::Empty);
        }
        let url = ["postgres://", "postgresql://"].iter().find_map(|scheme| text.strip_prefix(scheme));
        match url {
            Some(rest) => read_url(rest),
            None => read_pairs(text),
        }
    }

    pub(super) fn set(&mut self, key: &str, value: impl Into<String>) {
        self.take(key);
        self.0.push((key.to_string(), value.into()));
    }

    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        let place = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.remove(place).1)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(key, _)| key.as_str())
    }

    /// The `key='value'` form, which the driver reads.
    pub(super) fn to_pairs(&self) -> String {
        let quoted = |value: &str| value.replace('\\', r"\\").replace('\'', r"\'");
        self.0.iter().map(|(key, value)| format!("{key}='{}' ", quoted(value))).collect()
    }
}

fn read_url(rest: &str) -> Result<Params, ParseError> {
    let (head, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, database) = head.split_once('/').unwrap_or((head, ""));
    let (credentials, hosts) = match authority.split_once('@') {
        Some((credentials, hosts)) => (Some(credentials), hosts),
        None => (None, authority),
    };
    // A raw `@` or `/` in the password would make its tail a host or a database, and show it.
    if hosts.contains('@') || database.contains('@') {
        return Err(ParseError::Unencoded);
    }
    let mut params = Params::default();
    if let Some(credentials) = credentials {
        read_credentials(credentials, &mut params)?;
    }
    read_hosts(hosts, &mut params)?;
    if !database.is_empty() {
        params.set("dbname", decode(database)?);
    }
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (key, value) = parameter.split_once('=').ok_or(ParseError::Query)?;
        params.set(&decode(key)?, decode(value)?);
    }
    Ok(params)
}

fn read_credentials(credentials: &str, params: &mut Params) -> Result<(), ParseError> {
    let (user, password) = match credentials.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (credentials, None),
    };
    if !user.is_empty() {
        params.set("user", decode(user)?);
    }
    if let Some(password) = password {
        params.set("password", decode(password)?);
    }
    Ok(())
}

fn read_hosts(hosts: &str, params: &mut Params) -> Result<(), ParseError> {
    if hosts.is_empty() {
        return Ok(());
    }
    let (mut names, mut ports) = (Vec::new(), Vec::new());
    for host in hosts.split(',') {
        let (name, port) = match host.strip_prefix('[') {
            Some(bracketed) => {
                let (name, tail) = bracketed.split_once(']').ok_or(ParseError::Host)?;
                let port = if tail.is_empty() { Some("") } else { tail.strip_prefix(':') };
                (name, port.ok_or(ParseError::Host)?)
            }
            None => host.split_once(':').unwrap_or((host, "")),
        };
        names.push(decode(name)?);
        ports.push(decode(port)?);
    }
    params.set("host", names.join(","));
    if ports.iter().any(|port| !port.is_empty()) {
        params.set("port", ports.join(","));
    }
    Ok(())
}

/// Undoes percent-encoding. A zero byte would end the value early inside the server.
fn decode(text: &str) -> Result<String, ParseError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.extend(u8::try_from(high * 16 + low)),
            _ => return Err(ParseError::Encoding),
        }
    }
    let decoded = String::from_utf8(bytes).map_err(|_| ParseError::Encoding)?;
    if decoded.contains('\0') { Err(ParseError::Encoding) } else { Ok(decoded) }
}

fn read_pairs(text: &str) -> Result<Params, ParseError> {
    let mut params = Params::default();
    let mut rest = text.chars().peekable();
    loop {
        skip_space(&mut rest);
        let mut key = String::new();
        while let Some(c) = rest.next_if(|c| *c != '=' && !c.is_whitespace()) {
            key.push(c);
        }
        skip_space(&mut rest);
        match (key.is_empty(), rest.next()) {
            (true, None) => return Ok(params),
            (false, Some('=')) => {}
            _ => return Err(ParseError::Pairs),
        }
        skip_space(&mut rest);
        params.set(&key, read_value(&mut rest)?);
    }
}

fn read_value(rest: &mut Peekable<Chars<'_>>) -> Result<String, ParseError> {
    let quoted = rest.next_if_eq(&'\'').is_some();
    let mut value = String::new();
    loop {
        match rest.peek() {
            None if quoted => return Err(ParseError::Quote),
            None => return Ok(value),
            Some(c) if !quoted && c.is_whitespace() => return Ok(value),
            Some(_) => {}
        }
        match rest.next() {
            Some('\'') if quoted => return Ok(value),
            Some('\\') => value.extend(rest.next()),
            Some(c) => value.push(c),
            None => return Ok(value),
        }
    }
}

fn skip_space(rest: &mut Peekable<Chars<'_>>) {
    while rest.next_if(|c| c.is_whitespace()).is_some() {}
}
