# Where heavy builds are kept: Kubernetes' and Talos's components, and the tools below.
CACHE ?= $(or $(TALOS_CCM_CACHE),$(HOME)/.cache/talos-ccm)
override CACHE := $(abspath $(CACHE))
export TALOS_CCM_CACHE := $(CACHE)

GOLANGCI_LINT_VERSION ?= v2.15.0
GOFUMPT_VERSION ?= v0.12.0

ARTIFACTS ?= _out
ARCHES ?= amd64 arm64
TAG ?= $(shell git describe --tags --dirty --match 'v[0-9]*' 2>/dev/null || echo v0.0.0-g$$(git rev-parse --short HEAD 2>/dev/null || echo unknown))

# How long `make test` and `make e2e` may take for one package, and `make fuzz` for one test.
TEST_TIMEOUT ?= 10m
E2E_TIMEOUT ?= 30m
FUZZTIME ?= 10s
BENCH ?= .

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

GO ?= go
# A tool is built anew with each version of Go: the linter must not be older than what it reads.
TOOLS := $(CACHE)/tools/$(firstword $(shell $(GO) env GOVERSION))
GOLANGCI_LINT := $(TOOLS)/golangci-lint-$(GOLANGCI_LINT_VERSION)/golangci-lint
GOFUMPT := $(TOOLS)/gofumpt-$(GOFUMPT_VERSION)/gofumpt

LDFLAGS := -s -w -buildid= -X k8s.io/component-base/version.gitVersion=$(TAG)

# What has Go code of ours, nested modules included.
SOURCES := cmd extension pkg test
# The packages whose tests start a real API server, or with -v those whose tests do not.
on_api_server = $(GO) list -f '{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}' ./... | grep $(1) '/test/kube' | cut -d' ' -f1

.PHONY: help
help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%) ## Build static binaries into _out.

# Go knows better than make what has changed.
.PHONY: $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%)
$(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%): $(ARTIFACTS)/talos-ccm-linux-%:
	CGO_ENABLED=0 GOOS=linux GOARCH=$* $(GO) build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o $@ ./cmd/talos-ccm

.PHONY: kube-assets
kube-assets: ## Build the Kubernetes components of the test bed, unless they are cached or KUBEBUILDER_ASSETS names some.
	$(GO) run ./test/kube/cmd/kube-assets

.PHONY: demo
demo: ## Show the whole chain on simulated machines: make demo [NODES=20].
	@mkdir -p $(ARTIFACTS)
	@$(GO) build -o $(ARTIFACTS)/demo ./test/demo
	@$(ARTIFACTS)/demo $(if $(NODES),-nodes $(NODES))

.PHONY: lint
lint: $(GOLANGCI_LINT) $(GOFUMPT) ## Lint, and check the formatting.
	$(GOLANGCI_LINT) run --allow-parallel-runners ./...
	@unformatted=$$($(GOFUMPT) -l $(SOURCES)); [ -z "$$unformatted" ] || { echo "Not formatted (make fmt):"; echo "$$unformatted"; exit 1; }

.PHONY: fmt
fmt: $(GOLANGCI_LINT) $(GOFUMPT) ## Format all Go code.
	$(GOLANGCI_LINT) fmt ./...
	$(GOFUMPT) -w $(SOURCES)

.PHONY: unit
unit: ## Run the tests that need no API server.
	$(GO) test -timeout $(TEST_TIMEOUT) $$($(call on_api_server,-v))

.PHONY: integration
integration: kube-assets ## Run the tests against a real API server.
	$(GO) test -timeout $(TEST_TIMEOUT) $$($(call on_api_server,))

.PHONY: race
race: kube-assets compiler ## Run all tests, unit and integration, with the race detector.
	CGO_ENABLED=1 $(GO) test -race -count=1 -timeout $(TEST_TIMEOUT) ./...

.PHONY: test
test: lint race ## Lint, and run all tests but e2e with the race detector.

.PHONY: e2e
e2e: ## Run talos-ccm on two real Talos machines with real kubelets; needs root.
	$(GO) test -tags e2e -v -count=1 -p 1 -timeout $(E2E_TIMEOUT) ./test/talos ./test/e2e

.PHONY: fuzz
fuzz: ## Fuzz each parser for a while: make fuzz [FUZZTIME=10s].
	@grep -roE '^func Fuzz\w+' --include='*_test.go' cmd pkg | sed -E 's|^(.*)/[^/]*:func |./\1 |' | sort | while read -r folder name; do \
		$(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$folder"; \
	done

.PHONY: bench
bench: ## Run the benchmarks: make bench [BENCH=regexp].
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./...

.PHONY: clean
clean: ## Remove _out; the cache stays.
	rm -rf $(ARTIFACTS)

# The race detector is linked by a C compiler.
.PHONY: compiler
compiler:
	@.ci/compiler

$(GOLANGCI_LINT):
	@echo "Building golangci-lint $(GOLANGCI_LINT_VERSION) (once)"
	@cd / && CGO_ENABLED=0 GOFLAGS= GOBIN=$(@D) $(GO) install -trimpath github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)

$(GOFUMPT):
	@echo "Building gofumpt $(GOFUMPT_VERSION) (once)"
	@cd / && CGO_ENABLED=0 GOFLAGS= GOBIN=$(@D) $(GO) install -trimpath mvdan.cc/gofumpt@$(GOFUMPT_VERSION)
