# syntax=docker/dockerfile:1
# One static binary and the certificate authorities, nothing else: no shell, no libc, no root.

FROM rust:1.95-bookworm AS builder
WORKDIR /build
COPY . .
# crt-static needs the target named, or build scripts and macros would be linked statically too, which they cannot be.
# The caches keep what was compiled before: a change in src/ rebuilds musterd alone. They are not part of the image,
# so the binary is copied out of them.
ENV RUSTFLAGS="-C target-feature=+crt-static"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target,sharing=locked \
    target="$(rustc -vV | sed -n 's/^host: //p')" \
    && cargo build --locked --release --bin musterd --target "$target" \
    && install -D "target/$target/release/musterd" /out/musterd \
    && install -d /out/state

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="musterd" \
      org.opencontainers.image.description="A batch worker on PostgreSQL: every row accounted for, every batch finished exactly once" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
# Root's, so that the process cannot write over it even where the root is not read-only.
COPY --from=builder /out/musterd /musterd
COPY --from=builder --chown=65532:65532 /out/state/ /var/lib/musterd/
COPY LICENSE /LICENSE
# Inside a container loopback is the container itself: the probes come from outside.
ENV MUSTERD__HTTP__LISTEN=0.0.0.0:9464
# A number, so that Kubernetes can see that it is not root.
USER 65532:65532
WORKDIR /var/lib/musterd
EXPOSE 9464
STOPSIGNAL SIGTERM
ENTRYPOINT ["/musterd"]
CMD ["run", "--config", "/etc/musterd/musterd.toml"]
