//! What a handler may call an output file: one plain name, the same in every store and on every disk it is downloaded to.

/// Written last, beside the files it describes.
pub const MANIFEST: &str = "manifest.json";

const LONGEST: usize = 200;

/// Why `name` cannot name an output file, if it cannot.
pub fn file_name_problem(name: &str) -> Option<&'static str> {
    match name {
        "" => Some("it is empty"),
        MANIFEST => Some("it is reserved for the list of the files"),
        _ if name.len() > LONGEST => Some("it is longer than 200 bytes"),
        _ if name.starts_with('.') => Some("it begins with a dot"),
        _ if name.contains(['/', '\\']) => Some("it has a slash: folders are not for outputs"),
        _ if name.chars().any(char::is_control) => Some("it has a control character"),
        _ if name.trim() != name => Some("it begins or ends with a blank"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_are_accepted() {
        for name in ["a", "out.csv", "a..b", "ü b+c 日本.ndjson", "manifest.json.gz", &"x".repeat(200)] {
            assert_eq!(file_name_problem(name), None, "{name:?}");
        }
    }

    #[test]
    fn what_could_leave_its_folder_or_hide_is_refused() {
        let long = "x".repeat(201);
        for name in ["", ".", "..", ".x", "a/b", "../a", "a\\b", "a\nb", "a\0b", " a", "a ", MANIFEST, &long]
        {
            assert!(file_name_problem(name).is_some(), "{name:?}");
        }
    }
}
