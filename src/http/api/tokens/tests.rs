use super::*;

const READ: &str = "read-canary-0123456789";
const WRITE: &str = "write-canary-0123456789";

async fn scope_of(tokens: &Tokens, token: &str) -> Option<Scope> {
    tokens.holder_of(token).await.map(|holder| holder.scope)
}

async fn after(time: Duration) {
    tokio::time::advance(time).await;
}

#[tokio::test]
async fn a_directory_of_secrets_is_read_as_one_and_hidden_files_are_not() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("one"), format!("{READ}\n")).unwrap();
    std::fs::write(dir.path().join("two"), format!("# a comment\n\n{WRITE}")).unwrap();
    std::fs::write(dir.path().join("..data"), "hidden-canary-0123456789").unwrap();
    let tokens = Tokens::new(Some(dir.path().into()), None);
    assert!(tokens.are_wanted());
    assert_eq!(scope_of(&tokens, READ).await, Some(Scope::Read));
    assert_eq!(scope_of(&tokens, WRITE).await, Some(Scope::Read));
    assert_eq!(scope_of(&tokens, "hidden-canary-0123456789").await, None);
    assert!(!format!("{tokens:?}").contains("canary"));
}

#[tokio::test]
async fn a_line_names_the_holder_of_its_token_or_its_hash_does() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, format!("alice:{READ}\nbob : {WRITE}\nplain-canary-0123456789\nno name:{READ}2\n"))
        .unwrap();
    let tokens = Tokens::new(None, Some(file.clone()));
    let name = async |token: &str| tokens.holder_of(token).await.map(|holder| holder.name.to_string());
    assert_eq!(name(READ).await.as_deref(), Some("alice"));
    assert_eq!(name(WRITE).await.as_deref(), Some("bob"));
    let plain = name("plain-canary-0123456789").await.unwrap();
    assert!(plain.starts_with("sha256-") && plain.len() == 15 && !plain.contains("canary"), "{plain}");
    assert_eq!(name(&format!("{READ}2")).await, None, "a name has no space");
    assert_eq!(name(&format!("alice:{READ}")).await, None, "the name is no part of the token");
    let (valid, problems) = examine(&file);
    assert!(valid == 3 && problems.len() == 1 && !problems[0].contains("canary"), "{problems:?}");
}

#[tokio::test]
async fn short_tokens_empty_lines_and_absent_files_let_no_request_in() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, "short\nname:short\n\n  \n").unwrap();
    let tokens = Tokens::new(Some(dir.path().join("absent")), Some(file));
    for token in ["", "short", " ", "absent", "name:short"] {
        assert_eq!(scope_of(&tokens, token).await, None, "{token:?}");
    }
}

#[tokio::test]
async fn to_write_is_to_read_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, WRITE).unwrap();
    let tokens = Tokens::new(None, Some(file));
    assert_eq!(scope_of(&tokens, WRITE).await, Some(Scope::Write));
    assert!(Scope::Write >= Scope::Read);
}

#[tokio::test(start_paused = true)]
async fn tokens_of_a_file_or_directory_that_is_gone_end_within_a_minute() {
    let dir = tempfile::tempdir().unwrap();
    let (file, folder) = (dir.path().join("tokens"), dir.path().join("folder"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(&file, WRITE).unwrap();
    std::fs::write(folder.join("one"), READ).unwrap();
    let tokens = Tokens::new(Some(folder.clone()), Some(file.clone()));
    assert_eq!(scope_of(&tokens, WRITE).await, Some(Scope::Write));
    std::fs::remove_file(&file).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    after(Duration::from_secs(30)).await;
    assert_eq!(scope_of(&tokens, WRITE).await, Some(Scope::Write), "it may be about to be replaced");
    assert_eq!(scope_of(&tokens, READ).await, Some(Scope::Read));
    after(Duration::from_secs(30)).await;
    assert_eq!(scope_of(&tokens, WRITE).await, None);
    assert_eq!(scope_of(&tokens, READ).await, None);
    std::fs::write(&file, WRITE).unwrap();
    after(FRESH).await;
    assert_eq!(scope_of(&tokens, WRITE).await, Some(Scope::Write));
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_read_keeps_no_other_from_changing() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for (name, token) in [("kept", READ), ("spoilt", WRITE), ("revoked", "revoked-canary-0123456789")] {
        std::fs::write(path(name), token).unwrap();
    }
    let tokens = Tokens::new(Some(dir.path().into()), None);
    assert_eq!(scope_of(&tokens, "revoked-canary-0123456789").await, Some(Scope::Read));
    std::fs::write(path("spoilt"), b"\xff\xfe not UTF-8, 0123456789").unwrap();
    std::fs::remove_file(path("revoked")).unwrap();
    std::fs::write(path("added"), "added-canary-0123456789").unwrap();
    after(FRESH).await;
    assert_eq!(scope_of(&tokens, "revoked-canary-0123456789").await, None);
    assert_eq!(scope_of(&tokens, "added-canary-0123456789").await, Some(Scope::Read));
    assert_eq!(scope_of(&tokens, WRITE).await, Some(Scope::Read), "for a moment");
    after(source::GRACE).await;
    assert_eq!(scope_of(&tokens, WRITE).await, None);
    assert_eq!(scope_of(&tokens, READ).await, Some(Scope::Read));
}

#[tokio::test]
async fn a_file_that_is_too_large_is_refused_and_never_cut() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    // The limit lies within the last token: cut there, a part of it would be one.
    let padding = "#".repeat((1 << 20) - 21);
    std::fs::write(&file, format!("{padding}\n{WRITE}")).unwrap();
    let tokens = Tokens::new(None, Some(file.clone()));
    for token in [WRITE, &WRITE[..20], &WRITE[..19]] {
        assert_eq!(scope_of(&tokens, token).await, None, "{token}");
    }
    let (valid, problems) = examine(&file);
    assert!(valid == 0 && problems[0].contains("more than 1048576 bytes"), "{problems:?}");
}
