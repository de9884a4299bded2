mod layering;

use super::keys::keys_at;
use super::*;

fn given(toml: &str) -> (tempfile::TempDir, Given) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("musterd.toml");
    std::fs::write(&file, toml).unwrap();
    let given = Given { file: Some(file), env: Some(Vec::new()), ..Given::default() };
    (dir, given)
}

fn with_env(variables: &[(&str, &str)]) -> Given {
    let env = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Given { env: Some(env), ..Given::default() }
}

fn problems(given: &Given) -> Vec<Problem> {
    load(given).expect_err("this configuration is wrong").problems.iter().cloned().collect()
}

fn source_of(loaded: &Loaded, key: &str) -> String {
    loaded.values.iter().find(|shown| shown.key == key).unwrap().source.clone()
}

#[test]
fn the_shipped_file_says_the_defaults() {
    let loaded = load(&with_env(&[])).unwrap();
    assert_eq!(loaded.warnings, []);
    // The types' own defaults know no handlers and queues; those are built in by the file alone.
    let mut config = loaded.config;
    assert_eq!(config.queues.remove("default"), Some(queue::Config::default()));
    let noop = config.handlers.remove("noop").unwrap();
    assert_eq!(noop, handler::Config { builtin: noop.builtin, ..handler::Config::default() });
    assert_eq!(config.handlers.keys().collect::<Vec<_>>(), ["echo", "fail", "sleep"]);
    config.handlers.clear();
    assert_eq!(config, Config::default());
}

#[test]
fn the_shipped_file_has_every_key() {
    let shipped: toml::Table = SHIPPED.parse().unwrap();
    for section in keys_at::<Config>(&[]).iter().filter(|name| !["queues", "handlers"].contains(name)) {
        let path = [(*section).to_owned()];
        assert_ne!(keys_at::<Config>(&path), [""; 0], "{section}");
        for field in keys_at::<Config>(&path) {
            let written = shipped[*section].get(field).is_some()
                || [format!("# {field} = "), format!("# [{section}.{field}.")]
                    .iter()
                    .any(|line| SHIPPED.contains(line));
            assert!(written, "{section}.{field} is not in config/musterd.toml");
        }
    }
    for field in keys_at::<queue::Config>(&[]) {
        assert!(shipped["queues"]["default"].get(field).is_some(), "queues.default.{field}");
    }
}

#[test]
fn five_mistakes_are_five_problems() {
    let (_dir, given) = given(
        r#"
        [database]
        max_connections = "many"
        [livness]
        backend = "redis"
        [liveness]
        heartbeat_intervall = "30s"
        heartbeat_ttl = "a while"
        [batcher]
        max_size = 3000
        "#,
    );
    let found = problems(&given);
    let keys: Vec<&str> = found.iter().map(|problem| problem.key.as_str()).collect();
    for key in [
        "database.max_connections",
        "livness.backend",
        "liveness.heartbeat_intervall",
        "liveness.heartbeat_ttl",
        "batcher.capacity",
    ] {
        assert!(keys.contains(&key), "{key} is missing from {keys:?}");
    }
    assert_eq!(keys.len(), 5, "{found:?}");
    let of = |key: &str| found.iter().find(|problem| problem.key == key).unwrap();
    assert!(of("livness.backend").message.contains("did you mean liveness?"), "{:?}", of("livness.backend"));
    let misspelt = of("liveness.heartbeat_intervall");
    assert!(misspelt.message.contains("did you mean liveness.heartbeat_interval?"), "{misspelt:?}");
    assert!(misspelt.source.contains("musterd.toml"), "{misspelt:?}");
}

#[test]
fn later_layers_win_and_are_named() {
    let (_dir, mut given) = given("[queues.default]\nfibers = 2\nblock_size = 10\n[batcher]\nmax_size = 7");
    given.env = Some(vec![
        ("MUSTERD__QUEUES__DEFAULT__FIBERS".into(), "3".into()),
        ("MUSTERD__BATCHER__MAX_SIZE".into(), "8".into()),
        ("MUSTERD_CONFIG".into(), "not a key".into()),
        ("MUSTERD__BATCHER__CAPACITY".into(), String::new()),
    ]);
    given.flags = vec!["batcher.max_size=9".into()];
    let loaded = load(&given).unwrap();
    assert_eq!(loaded.config.queues["default"].fibers.get(), 3);
    assert_eq!(loaded.config.queues["default"].block_size.get(), 10);
    assert_eq!(loaded.config.batcher.max_size.get(), 9);
    assert_eq!(loaded.config.batcher.capacity.get(), 2000, "an empty variable is no value");
    assert!(source_of(&loaded, "queues.default.block_size").starts_with("file "));
    assert_eq!(source_of(&loaded, "queues.default.fibers"), "environment MUSTERD__QUEUES__DEFAULT__FIBERS");
    assert_eq!(source_of(&loaded, "batcher.max_size"), "flag --set batcher.max_size");
    assert_eq!(source_of(&loaded, "batcher.capacity"), "default");
}

#[test]
fn queues_and_handlers_of_a_file_join_the_built_in_ones() {
    let (_dir, given) = given(
        "[queues.bulk]\nfibers = 1\n[handlers.slow]\nkind = \"builtin\"\nbuiltin = \"sleep\"\nqueue = \"bulk\"",
    );
    let config = load(&given).unwrap().config;
    assert_eq!(config.queues.keys().collect::<Vec<_>>(), ["bulk", "default"]);
    assert!(config.handlers.contains_key("noop") && config.handlers.contains_key("slow"));
}

#[test]
fn a_password_of_digits_stays_as_it_is() {
    let loaded = load(&with_env(&[("MUSTERD__OUTPUTS__S3__SECRET_KEY", "00123")])).unwrap();
    assert_eq!(loaded.config.outputs.s3.secret_key.expose(), "00123");
}

#[test]
fn a_secret_comes_from_a_file_and_is_never_shown() {
    let (dir, mut given) = given("");
    let secret = dir.path().join("url");
    std::fs::write(&secret, "postgres://app:canary@db/app\n").unwrap();
    given.env = Some(vec![
        ("MUSTERD__DATABASE__URL_FILE".into(), secret.display().to_string()),
        ("MUSTERD__OUTPUTS__S3__SECRET_KEY".into(), "canary".into()),
    ]);
    let loaded = load(&given).unwrap();
    assert_eq!(loaded.config.database.url.expose(), "postgres://app:canary@db/app");
    let shown = format!("{:?} {} {:?}", loaded.values, loaded.nested(), loaded.config);
    assert!(!shown.contains("canary"), "{shown}");
    assert!(shown.contains("postgres://app:[redacted]@db/app"), "{shown}");
}

#[test]
fn secrets_of_handlers_come_from_files_and_are_never_shown() {
    let (dir, mut given) = given(
        "[handlers.charge]\nkind = \"http\"\nurl = \"http://127.0.0.1/\"\n[handlers.charge.headers]\nX-Key = \"canary\"",
    );
    let token = dir.path().join("token");
    std::fs::write(&token, "canary\n").unwrap();
    given.env = Some(vec![
        ("MUSTERD__HANDLERS__CHARGE__BEARER_TOKEN_FILE".into(), token.display().to_string()),
        ("MUSTERD__HANDLERS__CHARGE__SECRET".into(), "whsec_Y2FuYXJ5Y2FuYXJ5Y2FuYXJ5Y2FuYXJ5".into()),
    ]);
    let loaded = load(&given).unwrap();
    let charge = &loaded.config.handlers["charge"];
    assert_eq!(charge.bearer_token.as_ref().unwrap().expose(), "canary");
    assert_eq!(charge.headers.values().next().unwrap().expose(), "canary");
    let shown = format!("{:?} {} {:?}", loaded.values, loaded.nested(), loaded.config);
    assert!(!shown.contains("canary") && !shown.contains("Y2FuYXJ5"), "{shown}");
}

#[test]
fn a_wrong_secret_is_refused_without_being_quoted() {
    let found = problems(&with_env(&[("MUSTERD__DATABASE__URL", "mysql://app:canary@db")]));
    assert_eq!(found[0].key, "database.url");
    assert!(!format!("{found:?}").contains("canary"), "{found:?}");
}

#[test]
fn a_missing_secret_file_and_a_missing_config_file_are_named() {
    let mut given = with_env(&[("MUSTERD__REDIS__URL_FILE", "/nowhere/redis")]);
    given.file = Some("/nowhere/musterd.toml".into());
    let text = load(&given).unwrap_err().to_string();
    assert!(text.contains("/nowhere/redis") && text.contains("/nowhere/musterd.toml"), "{text}");
}

#[test]
fn broken_toml_is_told_with_its_line() {
    let (_dir, given) = given("[database]\nurl = \"postgres://db\"\nmax_connections = = 3\n");
    let text = load(&given).unwrap_err().to_string();
    assert!(text.contains("line 3"), "{text}");
}

#[test]
fn sections_are_checked_against_each_other() {
    let cases = [
        ("[liveness]\nheartbeat_interval = \"45s\"", "liveness.heartbeat_interval"),
        ("[liveness]\nrows_ttl = \"120s\"", "liveness.rows_ttl"),
        ("[completion]\nsweep_max = \"1m\"", "completion.sweep_max"),
        ("[retry]\nbase = \"10m\"", "retry.max"),
        ("[database]\nmax_connections = 3", "database.max_connections"),
        ("[handlers.charge]\nkind = \"builtin\"", "handlers.charge.builtin"),
        ("[handlers.noop]\nqueue = \"nowhere\"", "handlers.noop.queue"),
        ("[handlers.fail]\nrate = 2.0", "handlers.fail.rate"),
        ("[handlers.charge]\nkind = \"http\"", "handlers.charge.url"),
        ("[handlers.charge]\nkind = \"http\"\nurl = \"http://u:p@h/\"", "handlers.charge.url"),
        (
            "[handlers.charge]\nkind = \"http\"\nurl = \"http://10.0.0.1/\"\nallow_private = false",
            "handlers.charge.url",
        ),
        (
            "[handlers.charge]\nkind = \"http\"\nurl = \"http://h/\"\nsecret = \"short\"",
            "handlers.charge.secret",
        ),
        (
            "[handlers.charge]\nkind = \"http\"\nurl = \"http://h/\"\nrate_limit = \"fast\"",
            "handlers.charge.rate_limit",
        ),
        ("[handlers.charge]\nkind = \"exec\"", "handlers.charge.argv"),
        ("[handlers.charge]\nkind = \"exec\"\nargv = [\"x\"]\ncwd = \"/nowhere\"", "handlers.charge.cwd"),
        ("[handlers.charge]\nkind = \"sql\"", "handlers.charge.procedure"),
        ("[handlers.charge]\nkind = \"sql\"\nfunction = \"a b\"", "handlers.charge.function"),
        ("[queues.default]\nfibers = 0", "queues.default.fibers"),
        ("[log]\nlevel = \"loud=1=2\"", "log.level"),
        ("[outputs]\nstore = \"s3\"", "outputs.s3.bucket"),
    ];
    for (toml, key) in cases {
        let (_dir, given) = given(toml);
        let found = problems(&given);
        assert!(found.iter().any(|problem| problem.key == key), "{toml}: {found:?}");
    }
}

#[test]
fn lists_and_tables_are_set_by_variables_and_flags_too() {
    let mut given = with_env(&[
        ("MUSTERD__HANDLERS__RESIZE__KIND", "exec"),
        ("MUSTERD__HANDLERS__RESIZE__ARGV", r#"["python3", "resize.py"]"#),
        ("MUSTERD__HANDLERS__RESIZE__ENV", "[]"),
        (
            "MUSTERD__HANDLERS__CHARGE",
            r#"{ kind = "http", url = "http://h/", headers = { "X-Key.a" = "canary" } }"#,
        ),
    ]);
    given.flags = vec![r#"handlers.scale={ kind = "exec", argv = ["a=b"] }"#.into()];
    let loaded = load(&given).unwrap();
    let handlers = &loaded.config.handlers;
    assert_eq!(handlers["resize"].argv, ["python3", "resize.py"]);
    assert_eq!(handlers["resize"].env.as_deref(), Some(&[][..]));
    assert_eq!(handlers["scale"].argv, ["a=b"]);
    assert_eq!(handlers["charge"].headers["X-Key.a"].expose(), "canary");
    assert_eq!(source_of(&loaded, "handlers.resize.argv"), "environment MUSTERD__HANDLERS__RESIZE__ARGV");
    assert!(!format!("{:?}", loaded.values).contains("canary"));
    let wrong = problems(&with_env(&[("MUSTERD__HANDLERS__NOOP__ARGV", "python3 x.py")]));
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    assert!(wrong[0].message.starts_with("must be a list of texts"), "{wrong:?}");
}

#[test]
fn values_that_would_do_nothing_or_something_else_are_refused() {
    let cases = [
        ("[log]\nlevel = \"loud\"", "log.level", "no level"),
        ("[log]\nlevel = \"info,loud\"", "log.level", "no level"),
        ("[redis]\nurl = \"http://h:1\"", "redis.url", "redis://"),
        ("[liveness]\nbackend = \"postgres\"\n[redis]\nurl = \"http://h:1\"", "redis.url", "redis://"),
        ("[queues.\"a b\"]\nfibers = 1", "queues.a b", "letters, digits"),
        (
            "[handlers.x]\nkind = \"http\"\nurl = \"http://h/\"\nargv = [\"x\"]",
            "handlers.x.argv",
            "kind http, which has url,",
        ),
        (
            "[handlers.x]\nkind = \"exec\"\nargv = [\"x\"]\nprocedure = \"a.b\"",
            "handlers.x.procedure",
            "kind exec",
        ),
        ("[handlers.noop]\nurl = \"http://h/\"", "handlers.noop.url", "kind builtin"),
        (
            "[database]\nurl = \"postgres://h/d\"\nurl_file = \"/dev/null\"",
            "database.url",
            "is set twice, by database.url and by database.url_file",
        ),
    ];
    for (toml, key, said) in cases {
        let (_dir, given) = given(toml);
        let found = problems(&given);
        assert!(
            found.len() == 1 && found[0].key == key && found[0].message.contains(said),
            "{toml}: {found:?}"
        );
        assert!(found[0].source.contains("musterd.toml:"), "{toml}: {found:?}");
    }
    for level in ["warn,musterd::flow=debug", "off", "musterd=trace", "INFO"] {
        let (_dir, given) = given(&format!("[log]\nlevel = \"{level}\""));
        assert!(load(&given).is_ok(), "{level}");
    }
    // A builtin that is made another kind keeps nothing of what the shipped file said of it.
    let (_dir, over) = given("[handlers.noop]\nkind = \"http\"\nurl = \"http://h/\"");
    load(&over).unwrap();
}

#[test]
fn a_layer_above_may_name_a_secret_the_other_way() {
    let (_dir, mut given) = given("[database]\nurl_file = \"/dev/null\"");
    given.env = Some(vec![("MUSTERD__DATABASE__URL".into(), "postgres://h/d".into())]);
    assert_eq!(load(&given).unwrap().config.database.url.expose(), "postgres://h/d");
}

#[test]
fn every_key_of_a_handler_belongs_to_a_kind() {
    use handler::Kind;
    let all = [Kind::Builtin, Kind::Sql, Kind::Http, Kind::Exec];
    for field in keys_at::<handler::Config>(&[]) {
        let common = ["kind", "queue", "timeout", "max_timeout"].contains(field);
        assert!(common || all.iter().any(|kind| kind.keys().contains(field)), "{field}");
    }
}

#[test]
fn a_wrong_value_is_told_once_with_what_is_allowed_and_where_it_stands() {
    let cases = [
        ("[liveness]\nbackend = \"etcd\"", "liveness.backend: must be auto, redis or postgres, not \"etcd\""),
        ("[queues.default]\nmode = 3", "queues.default.mode: must be parallel or structured, not 3"),
        (
            "[queues.default]\nfibers = 0",
            "queues.default.fibers: must be a whole number from 1 to 4294967295, not 0",
        ),
        (
            "[http]\nlisten = \"localhost:9464\"",
            "http.listen: must be an address and a port, such as 127.0.0.1:9464, not \"localhost:9464\"",
        ),
        ("retry = 3", "retry: must be a table ([retry]), not 3"),
        (
            "[handlers.x]\nkind = \"exec\"\nargv = \"x.py\"",
            "handlers.x.argv: must be a list of texts, such as [\"python3\", \"work.py\"], not \"x.py\"",
        ),
        (
            "[handlers.x]\nbuiltin = \"loop\"",
            "handlers.x.builtin: must be noop, sleep, echo or fail, not \"loop\"",
        ),
        (
            "[handlers.x]\nkind = \"lambda\"\nurl = \"http://h/\"",
            "handlers.x.kind: must be builtin, sql, http or exec, not \"lambda\"",
        ),
        (
            "[shutdown]\ngrace = \"soon\"",
            "shutdown.grace: must be a time, such as \"30s\" or \"5m\", not \"soon\"",
        ),
    ];
    for (toml, said) in cases {
        let (_dir, given) = given(toml);
        let found = problems(&given);
        assert!(found.len() == 1 && found[0].to_string().starts_with(said), "{toml}: {found:?}");
        assert!(found[0].source.contains("musterd.toml:"), "{toml}: {found:?}");
    }
    let (_dir, three) = given("[queues.default]\nfibers = 0\nmode = \"x\"\nblock_size = 0");
    assert_eq!(problems(&three).len(), 3, "{:?}", problems(&three));
}

#[test]
fn a_contradiction_names_the_place_of_the_key_that_was_set() {
    let (_dir, mut given) = given("\n[liveness]\nheartbeat_ttl = \"10m\"");
    let found = problems(&given);
    assert_eq!(found[0].key, "liveness.rows_ttl");
    assert!(found[0].source.starts_with("liveness.heartbeat_ttl: file "), "{found:?}");
    assert!(found[0].source.ends_with("musterd.toml:3"), "{found:?}");
    given.file = None;
    given.env = Some(vec![("MUSTERD__LIVENESS__HEARTBEAT_TTL".into(), "10m".into())]);
    let found = problems(&given);
    assert_eq!(found[0].source, "liveness.heartbeat_ttl: environment MUSTERD__LIVENESS__HEARTBEAT_TTL");
}

#[test]
fn a_long_grace_is_a_warning() {
    let (_dir, given) = given("[shutdown]\ngrace = \"60s\"");
    let loaded = load(&given).unwrap();
    assert_eq!(loaded.warnings[0].key, "shutdown.grace");
}

#[test]
fn a_wrong_flag_is_a_problem() {
    let given = Given { flags: vec!["batcher.max_size".into()], env: Some(Vec::new()), ..Given::default() };
    assert!(problems(&given)[0].message.contains("section.key=value"));
}

#[test]
fn redis_is_used_when_it_is_named_or_asked_for() {
    let uses = |toml: &str| {
        let (_dir, given) = given(toml);
        let config = load(&given).unwrap().config;
        (config.liveness.backend.uses_redis(&config.redis), config.redis.url().expose().to_owned())
    };
    let usual = "redis://localhost:6379".to_owned();
    assert_eq!(uses(""), (false, usual.clone()));
    assert_eq!(uses("[redis]\nurl = \"redis://h:1\""), (true, "redis://h:1".into()));
    assert_eq!(uses("[liveness]\nbackend = \"redis\""), (true, usual));
    assert_eq!(
        uses("[liveness]\nbackend = \"postgres\"\n[redis]\nurl = \"redis://h:1\""),
        (false, "redis://h:1".into())
    );
}
