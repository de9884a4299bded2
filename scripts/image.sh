#!/bin/sh
# Builds the container image without Docker and without a registry, and starts it as a runtime would: `make image`.
#
# The last stage of the Dockerfile is built as it stands. What it takes from the builder stage, which needs an image of Rust
# from a registry, is built here instead, in the same way: the static binary, and the certificate authorities.
set -eu
cd "${0%/*}/.."

for tool in buildah cargo; do
    command -v "$tool" >/dev/null || { echo "image: $tool is missing" >&2; exit 1; }
done
target=$(rustc -vV | sed -n 's/^host: //p')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

binary=${MUSTERD_STATIC:-}
if [ -z "$binary" ]; then
    RUSTFLAGS="-C target-feature=+crt-static" \
        cargo build --locked --release --bin musterd --target "$target" --target-dir target/static
    binary=target/static/$target/release/musterd
fi
mkdir -p "$work/builder/etc/ssl/certs"
cp /etc/ssl/certs/ca-certificates.crt "$work/builder/etc/ssl/certs/"
install -D "$binary" "$work/builder/out/musterd"
install -d "$work/builder/out/state"
sed -n '/^FROM scratch/,$p' Dockerfile >"$work/Dockerfile"

store() { buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }
store bud --quiet --isolation chroot --build-context "builder=$work/builder" \
    --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" -f "$work/Dockerfile" -t musterd . >/dev/null
store push --quiet musterd "oci:$work/oci:latest"

echo "image: $(stat -c %s "$binary" | numfmt --to=iec) the binary, $(du -sb "$work/oci" | cut -f 1 | numfmt --to=iec) the image, compressed"
store inspect --type image --format 'image: user {{.OCIv1.Config.User}}, stop signal {{.OCIv1.Config.StopSignal}}, runs {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}' musterd
echo

container=$(store from --pull-never musterd)
mounted=$(store mount "$container")
find "$mounted" -type f | sed "s|^$mounted|image: file |"
echo "image: starting it, read-only, as process 1"
MUSTERD_TEST_ROOTFS="$mounted" cargo test --locked --all-features --test suite -- --exact \
    suite::image::as_process_1_without_rights_on_a_read_only_root_it_works_and_drains
