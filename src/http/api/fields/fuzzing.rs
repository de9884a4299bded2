//! What holds for any query and any body: a value that is taken is within its bounds, and everything else is a mistake that is named.

use super::{
    LONGEST, LONGEST_KEY, Object, Query, duration, id, idempotency_key, json_text, key, max_attempts, name,
    number, one_of, priority, time_limit,
};
use crate::{json::check::check, queue::is_valid_name};
use axum::http::{HeaderMap, HeaderValue};

pub(crate) fn any_request(bytes: &[u8]) {
    if let Ok(text) = str::from_utf8(bytes) {
        any_text(text);
        any_query(text);
    }
    if let Ok(value) = HeaderValue::from_bytes(bytes) {
        let headers = HeaderMap::from_iter([("idempotency-key".parse().expect("a name"), value)]);
        if let Ok(Some(key)) = idempotency_key(&headers) {
            assert_eq!(key.as_bytes(), bytes);
        }
    }
    any_body(bytes);
}

fn any_text(text: &str) {
    if let Ok(id) = id(text) {
        assert!(id > 0 && text.trim_start_matches('0') == id.to_string(), "{text:?} is {id}");
    }
    if let Ok(name) = name(text) {
        assert!(name == text && is_valid_name(text));
    }
    if let Ok(key) = key(text) {
        assert!(key == text && (1..=LONGEST_KEY).contains(&key.chars().count()));
    }
    if let Ok(number) = number(-5, 1_000)(text) {
        assert!((-5..=1_000).contains(&number));
    }
    assert!(duration(text).is_ok_and(|time| time <= LONGEST) || duration(text).is_err());
    assert!(max_attempts(text).is_ok_and(|most| most >= 1) || max_attempts(text).is_err());
    let _ = (priority(text), time_limit(text));
    assert_eq!(json_text(text).is_ok(), check(text).is_ok());
}

fn any_query(text: &str) {
    let given: Vec<(String, String)> = url::form_urlencoded::parse(text.as_bytes()).into_owned().collect();
    let mut query = Query::parse(text);
    let (line, state) = (query.one("id", id), query.many("state", one_of(&["queued", "failed"])));
    let required = query.required("name", name);
    query.flag("follow");
    let is_taken = query.done().is_ok();
    let count = |name: &str| given.iter().filter(|(given, _)| given == name).count();
    if is_taken {
        assert!(given.iter().all(|(name, _)| ["id", "state", "name", "follow"].contains(&name.as_str())));
        assert!(count("id") <= 1 && count("name") == 1 && is_valid_name(&required));
        assert!(line.is_some() == (count("id") == 1) && state.len() == count("state"));
    }
}

fn any_body(bytes: &[u8]) {
    let Ok(mut object) = Object::parse(bytes) else { return };
    assert!(str::from_utf8(bytes).is_ok_and(|text| check(text).is_ok()), "a body is JSON that can be stored");
    let payload = object.json("payload");
    let command = object.text("command", name);
    let timeout = object.text("timeout", time_limit);
    let hold = object.one("hold", "true or false", |hold: bool| Ok(hold));
    object.required("command");
    payload.iter().for_each(|json| assert!(check(json.text()).is_ok()));
    command.iter().for_each(|command| assert!(is_valid_name(command)));
    let _ = (timeout, hold, object.done());
}
