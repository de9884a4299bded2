//! Downloads: each file under another name first, hashed on the way, and there only when it is right.

use crate::cli::{Exit, Global, screen};
use anyhow::{Context, Result, bail};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use musterd::{
    flow::outputs::{FileEntry, Manifest},
    objects::{Key, Store, file_name_problem},
};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use tokio::{
    fs,
    io::{AsyncReadExt, AsyncWriteExt},
};

const BUFFER: usize = 256 << 10;

pub(super) async fn download(
    global: &Global,
    store: &Store,
    manifest: &Manifest,
    dir: &Path,
) -> Result<Exit> {
    fs::create_dir_all(dir).await.with_context(|| format!("cannot make {}", dir.display()))?;
    let total = manifest.files.iter().map(|file| file.bytes).sum();
    let bar = ProgressBar::new(total);
    if let Ok(style) =
        ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}")
    {
        bar.set_style(style);
    }
    let mut done = Vec::new();
    for file in &manifest.files {
        bar.set_message(file.name.clone());
        done.push((file, fetch(store, file, dir, &bar).await?));
    }
    bar.finish_and_clear();
    if global.json {
        let files = |(file, path): &(&FileEntry, PathBuf)| serde_json::json!({ "name": file.name, "path": path, "bytes": file.bytes, "sha256": file.sha256 });
        let files: Vec<_> = done.iter().map(files).collect();
        screen::json(&serde_json::json!({ "batch": manifest.batch, "files": files }))?;
        return Ok(Exit::Done);
    }
    for (file, path) in &done {
        screen::line(&format!("{}  {}  sha256 {} ok", path.display(), HumanBytes(file.bytes), file.sha256))?;
    }
    Ok(Exit::Done)
}

async fn fetch(store: &Store, file: &FileEntry, dir: &Path, bar: &ProgressBar) -> Result<PathBuf> {
    // The manifest came over the network: a name in it must not lead out of the directory.
    if let Some(problem) = file_name_problem(&file.name) {
        bail!("the manifest has a file that cannot be one, {:?}: {problem}", file.name);
    }
    let (path, part) = (dir.join(&file.name), dir.join(format!(".{}.part", file.name)));
    let copied = copy(store, file, &part, bar).await;
    if let Err(error) = copied {
        // It may not have been made; then there is nothing to remove.
        let _ = fs::remove_file(&part).await;
        return Err(error);
    }
    fs::rename(&part, &path).await.with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

async fn copy(store: &Store, file: &FileEntry, part: &Path, bar: &ProgressBar) -> Result<()> {
    let key = Key::new(&*file.key)?;
    let mut reader = store.get_stream(&key).await?;
    let writing = || format!("cannot write {}", part.display());
    let mut out = fs::File::create(part).await.with_context(writing)?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; BUFFER]);
    loop {
        let length = reader
            .read(&mut buffer)
            .await
            .with_context(|| format!("cannot read {}", store.location(&key)))?;
        if length == 0 {
            break;
        }
        hash.update(&buffer[..length]);
        bytes += length as u64;
        out.write_all(&buffer[..length]).await.with_context(writing)?;
        bar.inc(length as u64);
    }
    out.sync_all().await.with_context(writing)?;
    let found = hex::encode(hash.finalize());
    if (bytes, &found) != (file.bytes, &file.sha256) {
        bail!(
            "{} is not what the manifest says: {bytes} bytes and SHA-256 {found}, expected {} bytes and {}",
            store.location(&key),
            file.bytes,
            file.sha256,
        );
    }
    Ok(())
}
