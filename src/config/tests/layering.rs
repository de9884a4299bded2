//! Whatever is given in whatever layers: file < environment < `--set`, key by key, and a secret by `_file` stands where the secret would.

use super::*;
use proptest::prelude::*;

/// Whole numbers that no other key is checked against, with their defaults.
const NUMBERS: [(&str, i64); 3] =
    [("queues.default.fibers", 8), ("queues.default.block_size", 500), ("batcher.capacity", 2_000)];
const LAYERS: [&str; 3] = ["file ", "environment ", "flag "];

/// What a layer says of a secret.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Said {
    Nothing,
    Itself,
    ByFile,
}

fn said() -> impl Strategy<Value = Said> {
    prop::sample::select(vec![Said::Nothing, Said::Itself, Said::ByFile])
}

/// Lays `key = value` into one of the layers.
fn lay(given: &mut Given, toml: &mut String, layer: usize, key: &str, value: &str) {
    match layer {
        0 => {
            let (section, name) = key.rsplit_once('.').unwrap();
            toml.push_str(&format!("{section}.{name} = {value}\n"));
        }
        1 => {
            let name = format!("MUSTERD__{}", key.replace('.', "__").to_uppercase());
            given.env.get_or_insert_default().push((name, value.trim_matches('"').to_owned()));
        }
        _ => given.flags.push(format!("{key}={}", value.trim_matches('"'))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn the_last_layer_that_names_a_key_wins(
        numbers in prop::array::uniform3(prop::array::uniform3(prop::option::of(100..400_i64))),
        secrets in prop::array::uniform3(said()),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut given = Given { env: Some(Vec::new()), ..Given::default() };
        let mut toml = String::new();
        for (layer, numbers) in numbers.iter().enumerate() {
            for ((key, _), number) in NUMBERS.iter().zip(numbers) {
                number.iter().for_each(|number| lay(&mut given, &mut toml, layer, key, &number.to_string()));
            }
        }
        for (layer, said) in secrets.iter().enumerate() {
            let url = format!("postgres://layer-{layer}/");
            match said {
                Said::Nothing => {}
                Said::Itself => lay(&mut given, &mut toml, layer, "database.url", &format!("\"{url}\"")),
                Said::ByFile => {
                    let path = dir.path().join(layer.to_string());
                    std::fs::write(&path, format!("{url}\n")).unwrap();
                    lay(&mut given, &mut toml, layer, "database.url_file", &format!("\"{}\"", path.display()));
                }
            }
        }
        let file = dir.path().join("musterd.toml");
        std::fs::write(&file, &toml).unwrap();
        given.file = Some(file);

        let loaded = load(&given).unwrap();
        let queue = &loaded.config.queues["default"];
        let found = [queue.fibers.get() as i64, queue.block_size.get() as i64, loaded.config.batcher.capacity.get() as i64];
        for (place, (key, default)) in NUMBERS.iter().enumerate() {
            let winner = (0..3).rev().find_map(|layer| numbers[layer][place].map(|number| (layer, number)));
            prop_assert_eq!(found[place], winner.map_or(*default, |(_, number)| number), "{}", key);
            let source = winner.map_or("default", |(layer, _)| LAYERS[layer]);
            prop_assert!(source_of(&loaded, key).starts_with(source), "{} is of {}", key, source_of(&loaded, key));
        }
        if let Some(layer) = (0..3).rev().find(|layer| secrets[*layer] != Said::Nothing) {
            prop_assert_eq!(loaded.config.database.url.expose(), format!("postgres://layer-{layer}/"));
            let source = source_of(&loaded, "database.url");
            prop_assert!(source.starts_with(LAYERS[layer]), "{}", source);
            prop_assert_eq!(source.contains("contents of"), secrets[layer] == Said::ByFile);
        }
    }
}
