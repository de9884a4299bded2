//! The description of the API, written by hand and held to the routes by a test. People read it, too: docs/api.md.

use super::{fields::Query, problem::Problem};
use axum::{http::header, response::IntoResponse};

/// With the version of this binary in it.
const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn document(query: Query) -> Result<impl IntoResponse, Problem> {
    query.done()?;
    let document =
        DOCUMENT.replace("\"version\": \"0\"", concat!("\"version\": \"", env!("CARGO_PKG_VERSION"), "\""));
    Ok(([(header::CONTENT_TYPE, "application/json")], document))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::collections::BTreeSet;

    #[test]
    fn every_route_is_described_and_everything_described_is_a_route() {
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        let described: BTreeSet<(String, String)> = document["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, methods)| {
                let methods = methods.as_object().unwrap().keys().filter(|name| *name != "parameters");
                methods.map(|method| (path.clone(), method.clone())).collect::<Vec<_>>()
            })
            .collect();
        let routes = crate::http::api::book().pages.into_iter();
        let routes: BTreeSet<(String, String)> =
            routes.map(|(path, method)| (format!("/v1{path}"), method.as_str().to_lowercase())).collect();
        assert_eq!(described, routes);
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_problem_is_one() {
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        let mut references = Vec::new();
        collect(&document, &mut references);
        for reference in &references {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        assert!(references.len() > 50, "{}", references.len());
    }

    fn collect(value: &Value, references: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                references.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| collect(value, references));
            }
            Value::Array(values) => values.iter().for_each(|value| collect(value, references)),
            _ => {}
        }
    }
}
