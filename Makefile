# The only door to this repository. `make serve` and `make test` need nothing but
# Python 3.11+ and its venv module; everything else they bring themselves.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
PEERS  ?=
QUICK  ?=
THREADS ?=

.PHONY: setup serve test sim lint fmt bench bench-peers soak gpu-check check clean
.DEFAULT_GOAL := check

$(VENV)/.run: pyproject.toml constraints.txt scripts/setup
	PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup run
	touch $@

$(VENV)/.dev: $(VENV)/.run
	VENV=$(VENV) scripts/setup dev
	touch $@

setup: $(VENV)/.run ## make .venv and install what serving needs, as pinned

serve: setup ## serve the embedded model on http://127.0.0.1:8000
	$(BIN)/drumline serve $(ARGS)

test: $(VENV)/.dev ## run the tests
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest --numprocesses 2 --dist loadfile $(ARGS)

sim: $(VENV)/.dev ## engines of several ranks in virtual time, for more seeds than `test` plays
	SEEDS=$(or $(SEEDS),20000) $(BIN)/pytest tests/sim/test_ranks.py $(ARGS)

lint: $(VENV)/.dev ## formatting, lint, types, room contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/.dev ## format in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## benchmarks, as a table and as JSON in benchmarks/results
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-peers: $(VENV)/.dev ## drumline beside OpenVINO GenAI (installed apart from .venv) and, once they were asked for with PEERS="llama.cpp vllm", others; QUICK=1 for a short pass
	$(BIN)/python -m benchmarks.peers $(PEERS) $(if $(QUICK),--quick) $(if $(THREADS),--threads $(THREADS)) $(ARGS)

soak: $(VENV)/.dev ## long random runs: the scheduler beside the published one, grammars, the embedded model short of memory, ranks killed and stopped, two machines, sessions on two ranks, fifty sleeps, weights swapped forty times, restless clients, damaged model files, kernels under sanitizers, a million rounds for memory
	DRUMLINE_SOAK_EVENTS=5000 DRUMLINE_SOAK_EXAMPLES=1000 DRUMLINE_SOAK_LIVES=10 DRUMLINE_SOAK_ROUNDS=1000000 $(BIN)/pytest -o faulthandler_timeout=7200 tests/unit/scheduler $(ARGS)
	DRUMLINE_SOAK_WALKS=20 DRUMLINE_SOAK_GRAMMARS=5000 $(BIN)/pytest -o faulthandler_timeout=7200 tests/unit/grammar/test_suite_walks.py tests/unit/grammar/test_fuzz.py $(ARGS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_ENDS=3 $(BIN)/pytest tests/e2e/test_ranks_that_end.py $(ARGS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_SWAPS=20 $(BIN)/pytest tests/e2e/test_weight_updates.py -o faulthandler_timeout=0 $(ARGS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_SLEEPS=50 $(BIN)/pytest tests/e2e/test_operations.py -o faulthandler_timeout=0 $(ARGS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_NODES=1 $(BIN)/pytest tests/e2e/test_two_nodes.py -o faulthandler_timeout=0 $(ARGS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_ROUTING=1 $(BIN)/pytest tests/e2e/test_routing_policies.py -o faulthandler_timeout=0 -o log_cli=true -o log_cli_level=INFO $(ARGS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_MEMORY=64 $(BIN)/pytest tests/e2e/test_too_little_memory.py tests/e2e/test_embedded_in_little_memory.py -o log_cli=true -o log_cli_level=INFO -o faulthandler_timeout=0
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_REQUESTS=10000 $(BIN)/pytest -o faulthandler_timeout=7200 tests/unit/frontend/test_restless_clients.py tests/e2e/test_restless_clients_of_workers.py $(ARGS)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE DRUMLINE_SOAK_DAMAGES=5000 DRUMLINE_SOAK_SANITIZERS=1 $(BIN)/pytest -o faulthandler_timeout=7200 tests/unit/device/test_damaged_files.py tests/unit/device/test_sanitized_kernels.py $(ARGS)
	$(BIN)/python -m benchmarks.round --soak 1000000 --json benchmarks/results/soak.json

# An environment that is named is taken as it is, such as that of an image with torch for CUDA.
gpu-check: $(if $(filter file,$(origin VENV)),$(VENV)/.dev) ## what can be checked on a GPU alone, within five minutes; VENV=DIR installs nothing
	HF_HUB_OFFLINE=1 PYTHONPATH=src:.:$(PYTHONPATH) timeout 300 $(BIN)/python -m pytest -o filterwarnings=default -o addopts=--strict-markers -rs --durations=5 tests/gpu tests/unit/device/test_on_cuda.py tests/unit/device/test_parts_on_cuda.py tests/unit/device/test_host_cache.py -k "gpu or cuda" $(ARGS)

check: lint test ## what must be green before a commit

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
