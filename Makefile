# One command is the whole of it: `make run` shows the product at work, `make test` is what CI runs.
# Every target with a `##` sentence appears in `make help`.

CARGO ?= cargo
MUSTERD := ./target/release/musterd
SHELL_SCRIPTS := .ci/run $(wildcard scripts/*.sh)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run dev test torture test-cluster test-families test-grid test-mutants test-outputs test-pooler test-retention test-rollout test-upload test-versions fuzz fmt lint check check-api check-docs check-deploy image build release setup setup-test bench bench-batcher bench-handlers clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: release ## Do the whole job once: embedded PostgreSQL, the daemon, a demo, a clean stop
	@$(MUSTERD) dev --ephemeral --demo

# The shell becomes musterd, so that Ctrl-C reaches it and make does not report its clean end as an error.
dev: release ## Start the embedded PostgreSQL and the daemon, and leave them running until Ctrl-C
	@exec $(MUSTERD) dev

test: setup-test ## Everything CI asks for: format, lints, tests, dependency policy, documents
	@scripts/step.sh "format" $(CARGO) fmt --check
	@scripts/step.sh "lints" $(CARGO) clippy --locked --all-targets --all-features -- -D warnings
	@scripts/step.sh "tests" $(CARGO) test --locked --all-features
	@scripts/step.sh --needs deny "licences and bans" $(CARGO) deny --offline --log-level error check bans licenses sources
	@scripts/step.sh --needs shellcheck "shell scripts" shellcheck $(SHELL_SCRIPTS)
	@scripts/step.sh "documents" $(MAKE) --no-print-directory check-docs

check-api: setup-test ## Try the HTTP API against its own description with Schemathesis (one of the tests)
	@$(CARGO) test --locked --all-features --test suite -- --nocapture api::schema

# Minutes, and a figure at its end; a smaller version is among the tests.
test-upload: setup-test ## Upload 1,000,000 rows to the HTTP API and measure the daemon's memory
	@$(CARGO) test --locked --all-features --test suite -- --ignored --nocapture a_million_rows

# Minutes, and a figure at its end; a smaller version is among the tests.
test-families: setup-test ## Run 10,000 parents with 8 children each on three replicas, and count every end
	@$(CARGO) test --locked --all-features --test suite -- --ignored --nocapture ten_thousand_families

test-outputs: setup-test ## Run a million rows with a gigabyte of outputs on both stores, and show the worker's memory
	@$(CARGO) test --locked --all-features --test suite -- --ignored --nocapture a_million_rows_with_a_gigabyte

# Minutes, and figures at its end.
test-retention: setup-test ## Prune 10,000,000 rows beside a running batch, and see the tables stop growing over 20 rounds
	@$(CARGO) test --locked --all-features --test suite -- --ignored --nocapture --test-threads 1 retention_load

# The seed repeats what is submitted and what goes wrong. One of the four replicas is of another build of the same schema, without features.
# A red run leaves its logs in target/tmp/torture.
OTHER := target/tmp/other-build
torture: setup-test ## Torture four replicas under random faults and account for every row (SEED=7 MINUTES=10 TORTURE="--json")
	@$(CARGO) build --locked --quiet --bin musterd
	@mkdir -p $(dir $(OTHER)) && cp target/debug/musterd $(OTHER)
	@$(CARGO) test --locked --quiet --all-features --test torture -- run --other $(OTHER) $(SEED:%=--seed %) $(MINUTES:%=--minutes %) $(TORTURE)

test-mutants: setup-test ## Take one mechanism after another out of the program, and see a test notice (MUTANTS="no_sweep no_lease")
	@scripts/mutants.sh $(MUTANTS)

test-grid: setup-test ## Let every named step of the program die, sleep past the TTL and fail, on two replicas (GRID="--only flush")
	@$(CARGO) test --locked --quiet --all-features --test torture -- grid $(GRID)

# Everything of batches and tasks again, with PgBouncer between the replicas and the database. Not in make test, which has a
# cross-section of it: it takes as long as those suites do, twice. Left out: schedules of statements, and a measure of LISTEN.
POOLED := suite::alive suite::batch_cli suite::drain suite::enqueue_file suite::handlers suite::outputs suite::poison suite::process suite::reconcile \
    suite::replicas suite::task_ suite::walk_ suite::why suite::writes_ suite::zombie
UNPOOLED := --skip suite::task_schedules --skip a_lone_task_ends_at_once
test-pooler: setup-test ## Run the suites of batches and tasks through PgBouncer, with a way past it and without
	@for way in direct polling; do \
	    echo "== behind PgBouncer: $$way"; \
	    MUSTERD_TEST_POOLER=$$way $(CARGO) test --locked --all-features --test suite -- $(POOLED) $(UNPOOLED) || exit 1; \
	done

# The same suites with their liveness in a Redis Cluster of three masters, of which one is always dying: killed, replaced by its
# replica, back, and then the next. The pooler's tests say themselves where the liveness is; task_schedules has no daemon.
FAILOVERS := target/tmp/redis-failovers
test-cluster: setup-test ## Run the suites of batches and tasks with a Redis Cluster whose masters die one after another
	@rm -f $(FAILOVERS)
	@MUSTERD_TEST_REDIS=cluster $(CARGO) test --locked --all-features --test suite -- $(POOLED) --skip task_schedules --skip pooler
	@echo "masters of Redis that died and were replaced meanwhile: $$(wc -l < $(FAILOVERS))"

# A figure at its end; the same, smaller and without it, is among the tests.
test-rollout: setup-test ## Replace 4 replicas under load and compare the rows per second with those before
	@$(CARGO) test --locked --all-features --test suite -- --ignored --nocapture a_rollout_keeps

# The whole suite once per version, against servers that MUSTERD_PG_BIN names; make test runs it on the machine's own PostgreSQL, with
# a cross-section on the oldest and the newest of these. For a part of it: make test-versions VERSIONS=14 SUITES=suite::walk_rows.
VERSIONS := 14 16 17 18
test-versions: setup-test ## Run the whole test suite on PostgreSQL 14, 16, 17 and 18, one after another
	@scripts/setup.sh node $(VERSIONS:%=postgres-%)
	@failed=; for version in $(VERSIONS); do \
	    MUSTERD_PG_BIN=$(CURDIR)/target/postgres-versions/$$version/native/bin scripts/step.sh "tests on PostgreSQL $$version" \
	        $(CARGO) test --locked --all-features --test suite -- $(SUITES) || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "tests failed on PostgreSQL$$failed" >&2; exit 1; }

# Any bytes against what musterd reads from outside. Their corpus is replayed by every make test; what a target finds is written to
# fuzz/artifacts, and belongs into its corpus with the fix. Without a sanitizer: that needs no nightly compiler, and no code here is unsafe.
SECONDS := 60
FUZZ_TARGETS := csv rows json protocol wire tokens fields
fuzz: ## Fuzz what comes from outside, a minute for each target (SECONDS=60 FUZZ_TARGETS="csv json")
	@scripts/setup.sh rust cc fuzz
	@$(CARGO) fuzz build --sanitizer none
	@for target in $(FUZZ_TARGETS); do \
	    mkdir -p target/fuzz-corpus/$$target; \
	    scripts/step.sh "fuzz $$target" $(CARGO) fuzz run --sanitizer none $$target target/fuzz-corpus/$$target fuzz/corpus/$$target -- \
	        -max_total_time=$(SECONDS) -max_len=4096 -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 || exit 1; \
	done

fmt: ## Format the code
	@$(CARGO) fmt

lint: ## Check the format and run clippy, as strictly as CI
	@$(CARGO) fmt --check
	@$(CARGO) clippy --locked --all-targets --all-features -- -D warnings

check: ## Type-check everything, the fastest answer to "does it compile?"
	@$(CARGO) check --locked --all-targets --all-features

check-docs: ## Check the links of the manual and the comments of the library
	@scripts/check-links.sh
	@RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --quiet --no-deps --document-private-items

bench-handlers: ## Rows per second of every kind of handler (ROWS=200000)
	@$(CARGO) bench --locked --bench handlers

check-deploy: setup-test ## Render and check the Kubernetes manifests, the alerts, the dashboard and the Dockerfile
	@$(CARGO) test --locked --all-features --test suite -- suite::deploy::

image: ## Build the container image without Docker or a registry, and start it read-only (needs buildah and root)
	@scripts/image.sh

build: ## Build the debug binary
	@$(CARGO) build --locked

release: setup ## Build the release binary, target/release/musterd
	@$(CARGO) build --locked --release --bin musterd

# The daemon it measures is the release binary: cargo builds it first. BENCH="--help" shows the options.
bench: setup ## Measure the walk of a row, submits, small batches, failures, latencies and tasks (BENCH="--only batches,tasks")
	@$(CARGO) bench --locked --quiet --bench throughput -- $(BENCH)

bench-batcher: setup ## Measure fifty writers on one parent row, with and without the update batcher
	@$(CARGO) bench --locked --quiet --bench batcher -- $(BENCH)

setup: ## Install what running needs (PostgreSQL, a linker), or say what to install
	@scripts/setup.sh rust cc postgres

setup-test: ## Install what the tests need as well (Redis, Valkey, PgBouncer, PostgreSQL 14 and 18, kubectl, cargo-deny, shellcheck, Schemathesis, the drivers of the examples)
	@scripts/setup.sh rust rust-lints cc postgres redis
	@scripts/setup.sh pgbouncer faketime deny shellcheck curl python node go python-driver node-driver schemathesis valkey kubectl promtool deploy-tools \
	    postgres-14 postgres-18 || :
# Those of other platforms too: a build skips them, the dependency policy reads them, offline.
	@$(CARGO) fetch --locked --quiet

clean: ## Remove what was built
	@$(CARGO) clean
