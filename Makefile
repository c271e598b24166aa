# What a person types. `make` alone lists the targets; each sets up .venv first when that is needed.
SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
PRESET ?=
ARGS ?=
BENCH ?=
MODEL ?= smollm2-135m
STAGE ?=
WORKERS ?= 2
export PYTHON EXTRA_INDEX
# Hundreds of processes start here: what one of them has compiled, the others read.
unexport PYTHONDONTWRITEBYTECODE

# Pins by machine: CUDA builds where an NVIDIA GPU answers, CPU builds everywhere else.
FLAVOUR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
READY := .venv/ready-$(FLAVOUR)
BIN := $(CURDIR)/.venv/bin
REPORT := results/gap/FINDINGS.md
RULES := Snakefile workflow/rules
RIVALS = "$(BIN)/pip" install --quiet --no-deps --upgrade --target .venv/rivals -r requirements/bench.txt \
	|| echo "Without all of requirements/bench.txt; the page names what is missing."
PYTEST = "$(BIN)/python" -m pytest -q -n $(WORKERS) --no-loadscope-reorder

# Where programs would fail one after the other, the first command says why; `make` alone lists all the same.
ifneq ($(filter-out help,$(MAKECMDGOALS)),)
WRONG := $(shell bash workflow/scripts/place.sh)
ifneq ($(WRONG),)
$(error $(WRONG))
endif
endif

.PHONY: help setup cluster findings audit test test-all test-rest test-nightly wheel-test lint kill-test recompute cost bench-codec bench-serving bench-load bench-ranks bench-micro docs reference kill-test-dvc test-slurm adopt pull ci-cached sync params-docs headline publish pins clean

help:  ## this list
	@echo "make TARGET, with ARGS='...' for options of the command that it runs"
	@sed -nE 's/^([a-z-]+):[^#]*##(.*)/  \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(READY)  ## .venv with everything in it (PYTHON=python3.11, EXTRA_INDEX=address)

$(READY): requirements/$(FLAVOUR).txt pyproject.toml
	@bash workflow/scripts/setup.sh $(FLAVOUR)

cluster: .venv/cluster-ready  ## what Snakemake wants besides on SLURM and Kubernetes; it then takes two seconds more to start

.venv/cluster-ready: $(READY) requirements/cluster.txt
	@"$(BIN)/pip" install --quiet --disable-pip-version-check --no-deps -r requirements/cluster.txt
	@touch $@

findings: $(READY)  ## run what is not done yet, up to the report (PRESET=quick: small and fast)
	@set -e; place=.; \
	if [ -n '$(PRESET)' ]; then place=$$("$(BIN)/python" workflow/scripts/workspace.py '$(PRESET)'); fi; \
	echo "Findings from $$place/params.yaml; what is done already stays done. Ctrl-C stops, the same command goes on."; \
	cd "$$place"; "$(BIN)/snakemake" all $(ARGS); \
	echo "Report: $$place/$(REPORT)"

test: $(READY)  ## what one runs before a commit, in two processes (WORKERS=1: in one)
	@$(PYTEST) -m "not full and not nightly" $(ARGS)

test-all: test test-rest  ## what CI runs: the tests of `make test`, then those of `make test-rest`

test-rest: $(READY)  ## DVC and Snakemake over the whole pipeline, vLLM with coded pages, compiled loops, planted results, a browser
	@$(PYTEST) -m "full" $(ARGS)

test-nightly: cluster  ## schedulers, S3, handovers, kills, most of vLLM, speculation, lm-eval; properties with all examples
	@$(PYTEST) -m "nightly or hypothesis" --hypothesis-profile=nightly $(ARGS)

wheel-test: $(READY)  ## build the wheel, install it into a new environment and use it there (ARGS='--with newest')
	@"$(BIN)/python" validation/wheel.py $(ARGS)

lint: $(READY)  ## ruff, snakefmt, snakemake --lint, dvc.yaml and config/ against the rules
	"$(BIN)/ruff" check src tests workflow validation docs/conf.py
	"$(BIN)/ruff" format --check src tests workflow validation docs/conf.py
	"$(BIN)/snakefmt" --check --line-length 110 $(RULES)
	"$(BIN)/snakemake" --lint
	"$(BIN)/python" workflow/scripts/dvc_sync.py --check
	"$(BIN)/python" workflow/scripts/params_docs.py --check
	"$(BIN)/python" workflow/scripts/metrics_schema.py --check

kill-test: $(READY)  ## SIGKILL jobs and Snakemake with all their children, run again, compare every table
	@"$(BIN)/python" validation/pipeline/kill_rules.py $(if $(PRESET),--preset '$(PRESET)') $(ARGS)

kill-test-dvc: $(READY)  ## SIGKILL DVC, Snakemake or a worker alone, run again, compare (ARGS='--times 10 --seed 0')
	@"$(BIN)/python" validation/pipeline/kill_runs.py $(if $(PRESET),--preset '$(PRESET)') $(ARGS)

test-slurm: cluster  ## the quick preset on a real SLURM on this machine (root, Debian; ARGS='--against DIR')
	@"$(BIN)/python" validation/pipeline/slurm.py $(ARGS)

recompute: $(READY)  ## measure a finished job again and compare it byte for byte (PRESET=quick, ARGS="'results/*/*/vllm-*'")
	@"$(BIN)/python" validation/pipeline/recompute.py $(if $(PRESET),--at '.runs/$(PRESET)') $(ARGS)

cost: $(READY)  ## seconds and memory at two sizes of windows, cells and layers -> results/cost/COST.md
	@"$(BIN)/python" validation/pipeline/cost.py $(ARGS)

bench-codec: $(READY)  ## every codec beside other libraries -> results/codec/BENCH.md (MODEL=SLUG, BENCH='--tensors DIR --sigma FILE')
	@$(RIVALS)
	@"$(BIN)/snakemake" ladder calib/capture/$(MODEL)/hf.safetensors calib/archive/$(MODEL)/hf.safetensors $(ARGS)
	@PATH="$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/.venv/rivals" "$(BIN)/python" -m kvlab bench --out results/codec \
		--capture calib/capture/$(MODEL)/hf.safetensors --windows calib/corpus/$(MODEL)/windows.safetensors \
		--archive calib/archive/$(MODEL)/hf.safetensors --model $(MODEL) --ladder results/ladder/$(MODEL) $(BENCH)

bench-serving: $(READY)  ## vLLM's plain pages and coded ones under the same loads -> results/serving/CAPACITY.md (MODEL=SLUG)
	@"$(BIN)/snakemake" results/capacity/$(MODEL)/CAPACITY.md $(ARGS)
	@mkdir -p results/serving && cp results/capacity/$(MODEL)/CAPACITY.md results/serving/CAPACITY.md

bench-load: $(READY)  ## what a smaller cache buys under load, simulated from steps of vLLM -> results/serving/LOAD.md (MODEL=SLUG)
	@"$(BIN)/snakemake" results/service/$(MODEL)/LOAD.md $(ARGS)
	@mkdir -p results/serving && cp results/service/$(MODEL)/LOAD.md results/service/$(MODEL)/load.json \
		results/service/$(MODEL)/steps.json results/serving/

bench-ranks: $(READY)  ## what several processes send each other -> results/serving/CLUSTER.md (MODEL=SLUG)
	@"$(BIN)/snakemake" results/ranks/$(MODEL)/CLUSTER.md $(ARGS)
	@mkdir -p results/serving && cp results/ranks/$(MODEL)/CLUSTER.md results/serving/CLUSTER.md

bench-micro: $(READY)  ## single operations of mechanisms beside other libraries -> results/micro/BENCH.md and results/serving/MICRO.md
	@$(RIVALS)
	@PYTHONPATH="$(CURDIR)/.venv/rivals" "$(BIN)/snakemake" results/micro/BENCH.md $(ARGS)
	@mkdir -p results/serving && cp results/micro/BENCH.md results/serving/MICRO.md

docs: $(READY) .venv/docs/ready  ## README, docs and published pages as a site, strict -> build/site/index.html
	@PYTHONPATH="$(CURDIR)/.venv/docs" "$(BIN)/python" -m sphinx -q -W --keep-going -c docs -b html . build/site $(ARGS)
	@echo "Site: build/site/index.html"

.venv/docs/ready: $(READY) requirements/docs.txt
	@"$(BIN)/pip" install --quiet --no-deps --upgrade --target .venv/docs -r requirements/docs.txt
	@touch $@

reference: $(READY)  ## train the embedded reference model again, into models/reference (an hour)
	"$(BIN)/python" -m kvlab step reference --out models/reference $(ARGS)

adopt: $(READY)  ## record in DVC what plain snakemake made (STAGE='data gate'; default: all)
	@"$(BIN)/python" workflow/scripts/dvc_sync.py --check >/dev/null
	@PATH="$(BIN):$$PATH" dvc repro --quiet code
	@"$(BIN)/python" workflow/scripts/handover.py adopt $(STAGE)

pull: $(READY)  ## restore what DVC records, and make it known to snakemake (STAGE=...; default: all)
	@PATH="$(BIN):$$PATH" dvc repro --quiet code
	@"$(BIN)/python" workflow/scripts/handover.py pull $(STAGE)

ci-cached: $(READY)  ## the report from cache and remote, and which stages ran (ARGS=--require-cached or --run-missing)
	@"$(BIN)/python" workflow/scripts/ci_cached.py $(ARGS)

sync: $(READY)  ## dvc.yaml from the rules, after a rule, a module or the list of models has changed
	@"$(BIN)/python" workflow/scripts/dvc_sync.py

params-docs: $(READY)  ## config/PARAMS.md and both JSON schemas, after a parameter, dvc.yaml or metrics.json has changed
	@"$(BIN)/python" workflow/scripts/params_docs.py
	@"$(BIN)/python" workflow/scripts/metrics_schema.py

headline: $(READY)  ## blocks of README and docs from results/ (MODEL=SLUG), and the pages of the same run, as `make publish`
	@"$(BIN)/python" -m kvlab step report --model $(MODEL) --metrics results/gap/metrics/$(MODEL).json --verdict results/gate/verdict/$(MODEL).json \
		--comparison results/gap/models/comparison.json --claims results/gate/claims.json \
		--benchmarks results/benchmarks --readme README.md
	@$(MAKE) --no-print-directory publish PRESET=

# TRUST.md is of the gate and of no model: a preset's pages name that of the recorded run.
publish:  ## the pages of a run into docs/results/ (PRESET=models: of that run, into docs/results/models/)
	@set -e; to=$(CURDIR)/docs/results$(if $(PRESET),/$(PRESET)); from='$(if $(PRESET),.runs/$(PRESET)/)results'; \
	[ -f "$$from/gap/FINDINGS.md" ] || { echo "error: $$from/gap/FINDINGS.md is not there; make it: make findings$(if $(PRESET), PRESET=$(PRESET))" >&2; exit 2; }; \
	cd "$$from"; rm -rf "$$to/gap" "$$to/gate"; mkdir -p "$$to"; \
	find gap gate \( -name '*.md' -o -name '*.svg' $(if $(PRESET),,-o -name '*.html') \) -exec cp --parents -t "$$to" {} +; \
	sed -i 's|(\.\./\.\./docs/|(../../$(if $(PRESET),../)|g$(if $(PRESET),; s|(TRUST.md)|(../../gate/TRUST.md)|g)' "$$to"/gate/*.md; \
	$(if $(PRESET),rm -f "$$to/gate/TRUST.md" "$$to/gate/detection.svg";) \
	find "$$to/gap" -name '*.svg' | while read -r figure; do \
		grep -q "$${figure##*/}" "$${figure%/figures/*}/FINDINGS.md" || rm "$$figure"; \
	done

audit: $(READY)  ## plant faults in the chain and in its files, and see what catches each: results/audit/AUDIT.md
	"$(BIN)/python" -m kvlab step audit --out results/audit/AUDIT.md

pins: $(READY)  ## resolve requirements/in.txt again, into requirements/{cpu,cuda,cluster}.txt (ARGS=--keep: only what is new)
	"$(BIN)/python" workflow/scripts/pins.py $(ARGS)

clean:  ## caches, what was measured before, and the workspaces of presets; results/, calib/ and .venv stay
	rm -rf .runs .kvlab .pytest_cache .ruff_cache .hypothesis build dvc_plots
	find src tests workflow -name __pycache__ -prune -exec rm -rf {} +
