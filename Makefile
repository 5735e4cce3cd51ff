# Everything a fresh machine needs comes from here: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
SEEDS ?= 1000
TEST_PROCESSES ?= 2
DEVICE ?= fake:0

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format evaluate batch-example gpu-check bench bench-quick bench-llm bench-ingress bench-batch bench-device bench-peers simulate docs clean

help:  ## say what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED)  ## make the virtual environment with pinned versions

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("weftline needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned packages into $(VENV) (torch among them: some minutes the first time)"
	@$(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

demo: setup  ## answer a spoken question about a picture with the bundled models
	@$(RUN) examples/demo.py

test: setup lint  ## lint, type-check and run every test
	$(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadfile

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
	$(RUN) -m benchmarks.overload --seconds 30
	$(RUN) -m benchmarks.deaths

bench-quick: setup  ## the same in about 2 minutes, to see that they run
	$(RUN) benchmarks/hops.py --quick --rounds 1
	$(RUN) -m benchmarks.scheduling --quick
	$(RUN) -m benchmarks.saturation --quick --nodes echo
	$(RUN) -m benchmarks.deadlines --quick --loads 1.2 2
	$(RUN) -m benchmarks.overload --quick --loads 2
	$(RUN) -m benchmarks.deaths --quick

gpu-check: setup  ## prove the GPU paths on a card, some minutes; what is missing is skipped with the reason
	$(RUN) -m weftline.engine.gpu_check --json gpu-check.json

bench-llm: setup  ## the LLM engine beside its peers, about 15 minutes
	$(RUN) -m benchmarks.llm
	$(RUN) -m benchmarks.llm --requests 128
	$(RUN) -m benchmarks.llm --model examples/models/shapes-chat
	$(RUN) -m benchmarks.llm_latency
	$(RUN) -m benchmarks.llm_host
	$(RUN) -m benchmarks.sampling
	$(RUN) -m benchmarks.weights

bench-batch: setup  ## jobs over data sets beside loops written by hand, and beside live requests
	$(RUN) -m benchmarks.batch --plot docs/images/batch-memory.svg
	$(RUN) -m benchmarks.live_job

bench-device: setup  ## hops of tensors on a device (a fake one unless DEVICE says), and steps that sleep
	$(RUN) benchmarks/device_hop.py --device $(DEVICE)
	$(RUN) -m benchmarks.sleep_wake

bench-ingress: setup  ## the gRPC ingress beside an empty echo, and Triton if it is built
	$(RUN) -m benchmarks.ingress
	$(RUN) -m benchmarks.ingress_hostile

bench-peers: setup  ## build the environment of each peer under .peers, then run what is measured beside them
	$(RUN) -m benchmarks.peers.environments
	$(RUN) -m benchmarks.ingress

simulate: setup  ## run the scheduler and device memory through SEEDS made-up worlds each
	$(RUN) -m tests.engine.simulation --seeds $(SEEDS)
	$(RUN) -m tests.shm.device.simulation --seeds $(SEEDS)

docs: setup  ## write the generated parts of the documentation again
	$(RUN) -m weftline.pipelines.reference
	$(RUN) -m weftline.pipelines.node_reference
	$(RUN) -m weftline.engine.ingress.reference
	$(RUN) -m weftline.engine.observe.reference

clean:  ## remove what was built, the virtual environment included
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
