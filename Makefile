# Everything a fresh machine needs comes from here: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
SEEDS ?= 1000
TEST_PROCESSES ?= 2
GPU_WHEELS := annotated-types cffi httptools llguidance msgspec prometheus-client protobuf pycparser pydantic pydantic-core \
	python-multipart python-rapidjson soundfile soxr starlette torchao tritonclient typing-inspection uvicorn uvloop
GPU_WHEELS_MIB := 20
GPU_PLATFORMS := $(foreach libc,5 12 17 24 27 28 31 34 35,--platform manylinux_2_$(libc)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64
GPU_PYTHON = $(if $(wildcard $(RUN)),$(RUN),$(PYTHON))
# Program, and the Debian package that brings it.
SLOW_TOOLS := espeak-ng:espeak-ng openssl:openssl curl:curl chromium:chromium h2load:nghttp2-client nghttp:nghttp2-client node:nodejs npm:npm \
	buildah:buildah debootstrap:debootstrap

# Without bytecode every process that a test starts would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-slow demo test test-slow test-versions lint format evaluate batch-example gpu-check gpu-wheels bench bench-quick bench-llm bench-ingress bench-hostile bench-batch bench-models bench-device bench-peers simulate docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED)  ## make the virtual environment with pinned versions

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("weftline needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned packages into $(VENV) (torch among them: some minutes the first time)"
	@$(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[all,yolo,dev]'
	@touch $@

# Its detector runs on ultralytics, which is AGPL-3.0: the extra yolo, which `setup` names beside all.
demo: setup  ## answer a spoken question about a picture with the bundled models (with ultralytics, AGPL-3.0)
	@$(RUN) examples/demo.py

setup-slow: setup  ## install what only the slow tests need: Debian packages (as root), npm packages, perf_analyzer
	@for tool in $(SLOW_TOOLS); do command -v $${tool%:*} >/dev/null || missing="$$missing $${tool#*:}"; done; \
		test -z "$$missing" || { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; }
	@test -d build/npm/node_modules/@ai-sdk/openai -a -d build/npm/node_modules/@ai-sdk/openai-compatible || \
		npm install --silent --no-audit --no-fund --prefix build/npm openai@6 @grpc/grpc-js@1 \
			ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7
	@test -x build/frameworks/bin/litellm || { $(RUN) -m venv build/frameworks && build/frameworks/bin/python -m pip \
		install -q --disable-pip-version-check --no-deps -r tests/engine/serving/openai/frameworks/requirements.txt; }
	@test -d build/generator/openapi_python_client || $(RUN) -m pip install -q --disable-pip-version-check --no-deps \
		--target build/generator openapi-python-client==0.29.1 ruamel.yaml==0.19.1
	@test -d build/validators/kubernetes_validate || $(RUN) -m pip install -q --disable-pip-version-check --no-deps \
		--target build/validators check-jsonschema==0.39.0 kubernetes-validate==1.37.0 regress==2026.9.1 \
		ruamel.yaml==0.19.1 importlib_resources==7.1.0
	@$(RUN) -m benchmarks.peers.environments perf

test: setup  ## lint, type-check and run the fast tests, some minutes
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & checks=$$!; \
	$(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not slow"; tests=$$?; \
	wait $$checks; checks=$$?; cat $(VENV)/lint.log; exit $$((tests | checks))

test-slow: setup setup-slow  ## run all other tests, about half an hour; a tool that is missing is a failure
	$(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadfile -m slow --tools-required --timeout 600

test-versions: setup  ## core tests on Python 3.11, 3.12 and 3.13 where installed, lowest and newest dependencies, 4 minutes
	$(RUN) -m pytest tests/test_install.py -k core_passes -m slow --timeout 600

lint: setup  ## ruff and mypy --strict
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup  ## rewrite the code in the house format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

evaluate: setup  ## score the flagship on unseen recordings and pictures (needs espeak-ng)
	$(RUN) -m examples.evaluate --report docs/evaluation.md

batch-example: build/scenes/questions.jsonl  ## a batch job: 2000 questions about generated pictures, some minutes
	$(RUN) -m weftline batch examples/batch/photo_questions.yaml --data $< --id photo --out build/answers --part-rows 250 \
		|| test $$? -eq 5 # error rows are expected: five pictures are spoilt
	$(RUN) -m examples.batch.score build/answers

build/scenes/questions.jsonl: examples/batch/make_scenes.py | setup
	$(RUN) -m examples.batch.make_scenes $(@D)

bench: setup  ## every benchmark of the engine, about 10 minutes
	$(RUN) benchmarks/hops.py --rounds 3
	$(RUN) -m benchmarks.scheduling --plot docs/images/scheduling.svg
	$(RUN) -m benchmarks.saturation --rounds 3 --seconds 3
	$(RUN) -m benchmarks.deadlines --rounds 3 --seconds 4 --loads 1.2 2
	$(RUN) -m benchmarks.timeouts
	$(RUN) -m benchmarks.overload --seconds 30
	$(RUN) -m benchmarks.deaths

bench-quick: setup  ## the same in about 2 minutes, to see that they run
	$(RUN) benchmarks/hops.py --quick --rounds 1
	$(RUN) -m benchmarks.scheduling --quick
	$(RUN) -m benchmarks.saturation --quick --nodes echo
	$(RUN) -m benchmarks.deadlines --quick --loads 1.2 2
	$(RUN) -m benchmarks.timeouts --quick
	$(RUN) -m benchmarks.overload --quick --loads 2
	$(RUN) -m benchmarks.deaths --quick

# Installs nothing: a card is often lent without a network. Call it again to go on from gpu-check.json.
gpu-check:  ## prove the GPU paths on a card (DEVICE=cuda:0), 9 minutes a call, or try that on a fake (DEVICE=fake:0)
	@mkdir -p build
	$(GPU_PYTHON) -m weftline.gpu_check --device $(or $(DEVICE),cuda:0) --triton-cache build/triton-cache \
		$(if $(findstring fake,$(DEVICE)),--quick --allow-skipped --json build/gpu-check-fake.json --again,--json gpu-check.json)

gpu-wheels:  ## collect what a card's machine with torch but without a network lacks, at most 20 MiB, for Python 3.12
	@rm -rf build/gpu-wheels && mkdir -p build/gpu-wheels
	@$(GPU_PYTHON) -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
		--implementation cp $(GPU_PLATFORMS) -c constraints.txt -d build/gpu-wheels $(GPU_WHEELS)
	@size=$$(du -sm build/gpu-wheels | cut -f1); test $$size -le $(GPU_WHEELS_MIB) || \
		{ rm -rf build/gpu-wheels; echo "gpu-wheels: $$size MiB, at most $(GPU_WHEELS_MIB) may be carried" >&2; exit 1; }
	@du -sh build/gpu-wheels
	@echo "carry build/gpu-wheels along with the source; on the card's machine, in the source's root:"
	@echo "    python3 -m pip install --no-index --no-deps --find-links build/gpu-wheels --target build/site $(GPU_WHEELS)"
	@echo "    export PYTHONPATH=build/site:."

bench-llm: setup  ## the LLM engine beside its peers, about 15 minutes
	$(RUN) -m benchmarks.llm
	$(RUN) -m benchmarks.llm --requests 128
	$(RUN) -m benchmarks.llm --model examples/models/shapes-chat
	$(RUN) -m benchmarks.llm_latency
	$(RUN) -m benchmarks.llm_host
	$(RUN) -m benchmarks.sampling
	$(RUN) -m benchmarks.weights

bench-models: setup  ## ViT and Whisper beside a loop by hand and a call per request, about 6 minutes
	$(RUN) -m benchmarks.models

bench-batch: setup  ## jobs over data sets beside loops written by hand, and beside live requests
	$(RUN) -m benchmarks.batch --plot docs/images/batch-memory.svg
	$(RUN) -m benchmarks.live_job

bench-device: setup  ## hops of tensors on a device (a fake one unless DEVICE says), and steps that sleep
	$(RUN) benchmarks/device_hop.py --device $(or $(DEVICE),fake:0)
	$(RUN) -m benchmarks.sleep_wake

bench-ingress: setup  ## the ingress beside Triton, mosec, Ray Serve, FastAPI, LitServe, BentoML and an empty echo, and overloaded, about 14 minutes
	$(RUN) -m benchmarks.peers.environments triton mosec ray fastapi litserve bentoml
	$(RUN) -m benchmarks.ingress $(if $(TRANSPORT),--transport $(TRANSPORT))
	$(RUN) -m benchmarks.tabular
	$(RUN) -m benchmarks.overload --grpc --seconds 20 $(if $(TRANSPORT),--transport $(firstword $(TRANSPORT)))

bench-hostile: setup  ## a healthy client beside hostile and greedy ones
	$(RUN) -m benchmarks.ingress_hostile
	$(RUN) -m benchmarks.ingress_hostile_limits

bench-peers: setup  ## build the environment of each peer under .peers
	$(RUN) -m benchmarks.peers.environments

simulate: setup  ## run the scheduler and device memory through SEEDS made-up worlds each
	$(RUN) -m tests.engine.simulation --seeds $(SEEDS)
	$(RUN) -m tests.shm.device.simulation --seeds $(SEEDS)

docs: setup  ## write the generated parts of the documentation again
	$(RUN) -m weftline.file_reference
	$(RUN) -m weftline.pipelines.render.reference
	$(RUN) -m weftline.module_reference
	$(RUN) -m weftline.engine.serving.reference
	$(RUN) -m weftline.engine.serving.openai.reference
	$(RUN) -m weftline.engine.serving.anthropic.reference
	$(RUN) -m weftline.engine.metrics.reference

clean:  ## remove what was built, the virtual environment included
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
