# Where heavy builds are kept: Kubernetes' and Talos's components, and the tools below.
CACHE ?= $(or $(TALOS_CCM_CACHE),$(HOME)/.cache/talos-ccm)
override CACHE := $(abspath $(CACHE))
export TALOS_CCM_CACHE := $(CACHE)

GOLANGCI_LINT_VERSION ?= v2.15.0
GOFUMPT_VERSION ?= v0.12.0
ACTIONLINT_VERSION ?= v1.7.12
GOVULNCHECK_VERSION ?= v1.8.0

ARTIFACTS ?= _out
ARCHES ?= amd64 arm64
describe := git describe --dirty --abbrev=12 2>/dev/null
TAG ?= $(shell $(describe) --tags --match 'v[0-9]*' || echo v0.0.0-g$$($(describe) --always --exclude '*' || echo unknown))
# Asked once: it is the same in all that one run of make builds.
TAG := $(TAG)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
# When everything in _out is said to be made, in seconds since 1970: at the commit.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
SOURCE_DATE_EPOCH := $(SOURCE_DATE_EPOCH)

# How long `make test` and `make e2e` may take for one package, and `make fuzz` for one test; which tests `make fuzz` runs.
TEST_TIMEOUT ?= 15m
E2E_TIMEOUT ?= 30m
FUZZTIME ?= 50000x
FUZZ ?= .
BENCH ?= .

# Of what users have Go do, nothing may show in what is built; on the command line of make, it does.
export GOWORK := off
export GOAMD64 := v1
export GOARM64 := v8.0
export GOFIPS140 := off
unexport GOEXPERIMENT

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

GO ?= go
# A tool is built anew with each version of Go: the linter must not be older than what it reads.
TOOLS := $(CACHE)/tools/$(firstword $(shell $(GO) env GOVERSION))
GOLANGCI_LINT := $(TOOLS)/golangci-lint-$(GOLANGCI_LINT_VERSION)/golangci-lint
GOFUMPT := $(TOOLS)/gofumpt-$(GOFUMPT_VERSION)/gofumpt
ACTIONLINT := $(TOOLS)/actionlint-$(ACTIONLINT_VERSION)/actionlint

# Talos's imager, out of the module that the test bed's Talos is built from.
TALOS_MODULE := test/talos/machined
IMAGER := $(TOOLS)/imager-$(shell cat $(TALOS_MODULE)/go.{mod,sum} | sha256sum | cut -c1-16)/imager

LDFLAGS := -s -w -buildid= -X github.com/talos-ccm/talos-ccm/pkg/version.version=$(TAG)

# What has Go code of ours, nested modules included.
SOURCES := cmd extension packaging pkg test
# The packages whose tests start a real API server, or with -v those whose tests do not.
on_api_server = $(GO) list -f '{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}' ./... | grep $(1) '/test/kube' | cut -d' ' -f1

.PHONY: help
help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%) ## Build static binaries into _out.

# Go knows better than make what has changed.
.PHONY: $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%)
$(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%): $(ARTIFACTS)/talos-ccm-linux-%:
	CGO_ENABLED=0 GOFLAGS=-mod=readonly GOOS=linux GOARCH=$* $(GO) build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o $@ ./cmd/talos-ccm

.PHONY: image
image: build sbom ## Write the extension's image and that for pods into _out, as OCI layouts for all architectures.
	$(GO) run ./packaging/cmd/image pack -version $(TAG) -revision '$(REVISION)' -output $(ARTIFACTS)/oci -pod-output $(ARTIFACTS)/oci-pod \
		$(foreach arch,$(ARCHES),$(arch)=$(ARTIFACTS)/talos-ccm-linux-$(arch))
	@echo "$$(CGO_ENABLED=0 GOOS=linux $(GO) list -deps ./cmd/talos-ccm | wc -l) Go packages are linked in"

.PHONY: push
push: ## Push what make image has written: make push REF=host/repository:tag [POD_REF=host/repository:tag].
	@[ -n '$(REF)$(POD_REF)' ] || { echo 'Where to? make push REF=host/repository:tag'; exit 1; }
	@[ -z '$(REF)' ] || $(GO) run ./packaging/cmd/image push $(ARTIFACTS)/oci '$(REF)'
	@[ -z '$(POD_REF)' ] || $(GO) run ./packaging/cmd/image push $(ARTIFACTS)/oci-pod '$(POD_REF)'

.PHONY: sbom
sbom: build ## Write the bill of materials of all Go modules into _out.
	$(GO) run ./packaging/cmd/sbom -version $(TAG) -output $(ARTIFACTS)/talos-ccm.spdx.json $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%)

.PHONY: kube-assets
kube-assets: ## Build the Kubernetes components of the test bed, unless they are cached or KUBEBUILDER_ASSETS names some.
	$(GO) run ./test/kube/cmd/kube-assets

.PHONY: demo
demo: ## Show the whole chain on simulated machines: make demo [NODES=20].
	@mkdir -p $(ARTIFACTS)
	@$(GO) build -o $(ARTIFACTS)/demo ./test/demo
	@$(ARTIFACTS)/demo $(if $(NODES),-nodes $(NODES))

.PHONY: lint
lint: $(GOLANGCI_LINT) $(GOFUMPT) $(ACTIONLINT) ## Lint, and check the formatting.
	$(GOLANGCI_LINT) run --allow-parallel-runners ./...
	@unformatted=$$($(GOFUMPT) -l $(SOURCES)); [ -z "$$unformatted" ] || { echo "Not formatted (make fmt):"; echo "$$unformatted"; exit 1; }
	$(ACTIONLINT) -shellcheck= -pyflakes=

.PHONY: generate
generate: ## Make the configuration's JSON schema and reference anew from its types. Tests check that they are current.
	$(GO) generate ./pkg/...

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
	CGO_ENABLED=1 $(GO) test -race -count=1 -timeout $(TEST_TIMEOUT) -exec '$(CURDIR)/.ci/quiet' ./...

.PHONY: docs
docs: ## Check every link, command and YAML block of the documents.
	@$(GO) test -count=1 -v -run '^TestDocuments$$' ./test/docs

# The binaries first: with an empty build cache they take longer than the tests of packaging/image, which need them, may take.
.PHONY: test
test: lint build race docs monitoring-test ## Lint, and run all tests but e2e with the race detector.

.PHONY: e2e
e2e: ## Run talos-ccm on two real Talos machines with real kubelets; needs root.
	$(GO) test -tags e2e -v -count=1 -p 1 -timeout $(E2E_TIMEOUT) ./test/talos ./test/e2e

.PHONY: imager-test
imager-test: image $(IMAGER) ## Have Talos's own imager put the packed extension into an initramfs, and look into that.
	@.ci/packages mksquashfs=squashfs-tools cpio=cpio zstd=zstd
	TALOS_CCM_IMAGER=$(IMAGER) TALOS_CCM_LAYOUT=$(abspath $(ARTIFACTS))/oci $(GO) test -tags e2e -v -count=1 -timeout $(TEST_TIMEOUT) ./test/imager

.PHONY: monitoring-test
monitoring-test: ## Hold alerts and dashboard against what is exported, with Prometheus' own code.
	cd test/monitoring/prometheus && $(GO) vet . && $(GO) test -count=1 -timeout $(TEST_TIMEOUT) .

.PHONY: fuzz
fuzz: ## Fuzz each parser for a while: make fuzz [FUZZTIME=10s] [FUZZ=regexp of folder and name].
	@grep -roE '^func Fuzz\w+' --include='*_test.go' cmd pkg | sed -E 's|^(.*)/[^/]*:func |./\1 |' | grep -E '$(FUZZ)' | sort | while read -r folder name; do \
		$(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$folder"; \
	done

.PHONY: bench
bench: ## Run the benchmarks: make bench [BENCH=regexp].
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./...

# A test compares vars.yaml with all else that has the version.
.PHONY: release-tag
release-tag:
	@version=v$$(sed -n 's/^VERSION: //p' vars.yaml); [ '$(TAG)' = "$$version" ] || { echo "The tag is $(TAG), but vars.yaml is of $$version"; exit 1; }

.PHONY: release-tree
release-tree:
	@[ -z "$$(git status --porcelain)" ] || { echo "There are changes that are not committed:"; git status --short; exit 1; }

.PHONY: release-artifacts
release-artifacts: release-tag release-tree image sbom ## Put what a release consists of, with checksums, into _out/release. TAG must be the version.
	rm -rf $(ARTIFACTS)/release
	mkdir -p $(ARTIFACTS)/release
	cp $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%) $(ARTIFACTS)/talos-ccm.spdx.json $(ARTIFACTS)/release
	cd $(ARTIFACTS)/release && sums=$$(sha256sum *) && sha512sum * >sha512sum.txt && echo "$$sums" >sha256sum.txt

.PHONY: vulncheck
vulncheck: ## Look for known vulnerabilities in what is linked in; asks vuln.go.dev.
	$(GO) run golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK_VERSION) ./cmd/...

.PHONY: commits
commits: ## Check the commits after a revision: make commits SINCE=origin/main.
	@.ci/commits '$(SINCE)'

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

$(IMAGER):
	@echo "Building Talos's imager (once)"
	@CGO_ENABLED=0 GOFLAGS=-mod=readonly $(GO) build -C $(TALOS_MODULE) -trimpath -buildvcs=false -tags tcell_minimal,grpcnotrace -ldflags '-s -w' \
		-o $@ github.com/siderolabs/talos/cmd/installer

$(ACTIONLINT):
	@echo "Building actionlint $(ACTIONLINT_VERSION) (once)"
	@cd / && CGO_ENABLED=0 GOFLAGS= GOBIN=$(@D) $(GO) install -trimpath github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT_VERSION)
