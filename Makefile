# Cache for expensive builds: components of Kubernetes and Talos, and the tools below.
CACHE ?= $(or $(TALOS_CCM_CACHE),$(HOME)/.cache/talos-ccm)
override CACHE := $(abspath $(CACHE))
export TALOS_CCM_CACHE := $(CACHE)

# renovate: datasource=go depName=github.com/golangci/golangci-lint/v2
GOLANGCI_LINT_VERSION ?= v2.15.0
# renovate: datasource=go depName=mvdan.cc/gofumpt
GOFUMPT_VERSION ?= v0.12.0
# renovate: datasource=go depName=github.com/rhysd/actionlint
ACTIONLINT_VERSION ?= v1.7.12
# renovate: datasource=go depName=golang.org/x/vuln
GOVULNCHECK_VERSION ?= v1.8.0
# renovate: datasource=go depName=helm.sh/helm/v4
HELM_VERSION ?= v4.3.1

ARTIFACTS ?= _out
ARCHES ?= amd64 arm64
# Source of Talos's images, and platform of the machines, for installer images.
TALOS_REGISTRY ?= ghcr.io/siderolabs
PLATFORM ?= metal
# Checkout of Talos for e2e and imager-test, absolute because Go runs tests in their own directories.
TALOS_SOURCE ?=
override TALOS_SOURCE := $(abspath $(TALOS_SOURCE))
export TALOS_SOURCE
describe := git describe --dirty --abbrev=12 2>/dev/null
TAG ?= $(shell $(describe) --tags --match 'v[0-9]*' || echo v0.0.0-g$$($(describe) --always --exclude '*' || echo unknown))
# Expand once, so that all targets of one run use the same value.
TAG := $(TAG)
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
# Timestamp of all artifacts as Unix time: the time of the commit.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
SOURCE_DATE_EPOCH := $(SOURCE_DATE_EPOCH)

# Timeouts per package of `make test`, `make e2e` and `make ha-test`; duration and selection for `make fuzz` and `make microbench`.
TEST_TIMEOUT ?= 15m
E2E_TIMEOUT ?= 30m
HA_TIMEOUT ?= 70m
FUZZTIME ?= 50000x
FUZZ ?= .
BENCH ?= .
# Packages that are tested at the same time. Most of the time they wait for an API server.
TEST_PACKAGES ?= 4

# Builds do not depend on the Go settings of the user. They can be overridden on the command line of make.
export GOWORK := off
export GOAMD64 := v1
export GOARM64 := v8.0
export GOFIPS140 := off
export CGO_ENABLED := 0
# The program does not serve gRPC's traces. Without the tag, the linker keeps all exported methods for their templates. All builds
# have the tag, so that packages are compiled once.
TAGS := grpcnotrace
# All checkouts share the build cache.
export GOFLAGS := -trimpath -tags=$(TAGS)
unexport GOEXPERIMENT

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

GO ?= go
# Tools are rebuilt for each version of Go: the linter must be built with at least the version of the code.
TOOLS := $(CACHE)/tools/$(firstword $(shell $(GO) env GOVERSION))
GOLANGCI_LINT := $(TOOLS)/golangci-lint-$(GOLANGCI_LINT_VERSION)/golangci-lint
GOFUMPT := $(TOOLS)/gofumpt-$(GOFUMPT_VERSION)/gofumpt
ACTIONLINT := $(TOOLS)/actionlint-$(ACTIONLINT_VERSION)/actionlint
HELM := $(TOOLS)/helm-$(HELM_VERSION)/helm

# Shows the progress of a go build, install or vet: $(PROGRESS) TITLE $(GO) build -o=FILE ...
PROGRESS := "$(CURDIR)/test/builder/progress"

LDFLAGS := -s -w -buildid= -X github.com/talos-ccm/talos-ccm/pkg/version.version=$(TAG)

CLIS := $(ARCHES:%=$(ARTIFACTS)/talos-ccm-darwin-%) $(ARCHES:%=$(ARTIFACTS)/talos-ccm-windows-%.exe)
go_build = @CGO_ENABLED=0 GOOS=$(1) GOARCH=$* $(PROGRESS) "Building $@" $(GO) build -trimpath -buildvcs=false -tags $(TAGS) -ldflags '$(LDFLAGS)' -o=$@ ./cmd/talos-ccm

# Directories with Go code, including nested modules.
SOURCES := cmd extension packaging pkg test
# Packages with tests, selected by a pattern over import path and imports. The slow ones do not start together. Assign it to a
# variable, because a failure within an argument is ignored.
packages = $$(echo ./pkg/controllers/csrapproval; $(GO) list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{join .Imports " "}} tests: {{join .TestImports " "}} {{join .XTestImports " "}} {{end}}' ./... | grep -E $(1) | cut -d' ' -f1 | sort -r)
concurrent = $(call packages,'^[^ ]*/(cmd|pkg)/.*( sync(/atomic)? .*tests:|/test/(kube|ctest))|^[^ ]*/pkg/internal/')
# Tests after go vet, without the log of talos-ccm.
go_test = $(GO) test -vet=off -count=1 -p $(TEST_PACKAGES) -timeout $(TEST_TIMEOUT) -exec '"$(CURDIR)/.ci/quiet"'

# Groups of targets in `make help`. All others are in the group Develop.
TRY := help demo
RELEASE := cli image installer chart push sbom release-artifacts outdated vulncheck

.PHONY: help
help: ## Show this help.
	@awk -F ':.*## ' -v try=' $(TRY) ' -v release=' $(RELEASE) ' '/^[a-z0-9-]+:.*## / { \
		group = index(try, " " $$1 " ") ? "Try" : index(release, " " $$1 " ") ? "Release" : "Develop"; \
		lines[group] = lines[group] sprintf("  %-18s %s\n", $$1, $$2) } \
		END { printf "Try\n%s\nDevelop\n%s\nRelease\n%s", lines["Try"], lines["Develop"], lines["Release"] }' $(MAKEFILE_LIST)

.PHONY: build
build: $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%) ## Build static binaries in _out.

.PHONY: cli
cli: $(CLIS) ## Build the commands for macOS and Windows in _out.

# Phony, because Go detects changes itself.
.PHONY: $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%) $(CLIS)
$(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%): $(ARTIFACTS)/talos-ccm-linux-%:
	$(call go_build,linux)

$(ARCHES:%=$(ARTIFACTS)/talos-ccm-darwin-%): $(ARTIFACTS)/talos-ccm-darwin-%:
	$(call go_build,darwin)

$(ARCHES:%=$(ARTIFACTS)/talos-ccm-windows-%.exe): $(ARTIFACTS)/talos-ccm-windows-%.exe:
	$(call go_build,windows)

.PHONY: image
image: build sbom ## Build the images of the extension and for pods as OCI layouts in _out.
	$(GO) run ./packaging/cmd/image -layouts $(ARTIFACTS) -version $(TAG) -revision '$(REVISION)' \
		$(foreach arch,$(ARCHES),$(arch)=$(ARTIFACTS)/talos-ccm-linux-$(arch))
	@echo "$$(GOOS=linux $(GO) list -deps ./cmd/talos-ccm | wc -l) Go packages in the binary"

.PHONY: installer
installer: image ## Build installer images, and push them: make installer TALOS=v1.14.1 [EXTENSIONS='image …'] [INSTALLER=host/repository:tag].
	@ARTIFACTS='$(abspath $(ARTIFACTS))' ARCHES='$(ARCHES)' TALOS='$(TALOS)' TALOS_REGISTRY='$(TALOS_REGISTRY)' PLATFORM='$(PLATFORM)' \
		EXTENSIONS='$(EXTENSIONS)' INSTALLER='$(INSTALLER)' GO='$(GO)' packaging/installer

# Prints the path of Helm for tests.
.PHONY: helm
helm: $(HELM)
	@echo $(HELM)

pod_tag = $(lastword $(subst :, ,$(POD_REF)))

# The chart is copied to set its image. Without an image, it can only be packaged.
.PHONY: chart
chart: $(HELM) ## Package the Helm chart in _out, and render it as manifests with an image: make chart [POD_REF=host/repository:tag].
	rm -rf $(ARTIFACTS)/chart
	mkdir -p $(ARTIFACTS)/chart
	cp -R packaging/chart $(ARTIFACTS)/chart/talos-ccm
	$(if $(POD_REF),sed -i 's|^  repository: .*|  repository: $(POD_REF:%:$(pod_tag)=%)|; s|^  tag: .*|  tag: $(pod_tag)|' $(ARTIFACTS)/chart/talos-ccm/values.yaml)
	$(HELM) lint --strict --namespace kube-system $(ARTIFACTS)/chart/talos-ccm
	$(HELM) package --destination $(ARTIFACTS)/chart $(ARTIFACTS)/chart/talos-ccm
	$(if $(POD_REF),$(HELM) template talos-ccm $(ARTIFACTS)/chart/talos-ccm --namespace kube-system >$(ARTIFACTS)/chart/talos-ccm.yaml)

.PHONY: push
push: $(if $(CHART_REF),$(HELM)) ## Push images, or the chart: make push [REF=host/repository:tag] [POD_REF=host/repository:tag] [CHART_REF=host/repository].
	@[ -n '$(REF)$(POD_REF)$(CHART_REF)' ] || { echo 'REF, POD_REF or CHART_REF is required: make push REF=host/repository:tag'; exit 1; }
	@for ref in '$(REF)' '$(POD_REF)'; do [[ -z $$ref || $$ref =~ ^[^/]*[.:][^/]*/.+:[^/]+$$ ]] || { echo "$$ref: want host/repository:tag"; exit 1; }; done
	@for layout in $(if $(REF),oci) $(if $(POD_REF),oci-pod); do [ -e $(ARTIFACTS)/$$layout/oci-layout ] || { echo "No image in $(ARTIFACTS)/$$layout, run make image"; exit 1; }; done
	@[ -z '$(REF)' ] || $(GO) tool crane push --index $(ARTIFACTS)/oci '$(REF)'
	@[ -z '$(POD_REF)' ] || $(GO) tool crane push --index $(ARTIFACTS)/oci-pod '$(POD_REF)'
	@[ -z '$(CHART_REF)' ] || $(HELM) push $(HELM_FLAGS) $(ARTIFACTS)/chart/talos-ccm-*.tgz 'oci://$(CHART_REF)' | sed -n 's|^Digest: |$(CHART_REF)/talos-ccm@|p'

.PHONY: sbom
sbom: build ## Write the SBOM of all Go modules to _out.
	$(GO) run ./packaging/cmd/image -sbom $(ARTIFACTS)/talos-ccm.spdx.json -version $(TAG) $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%)

.PHONY: kube-assets
kube-assets: ## Build a Kubernetes control plane for tests, unless cached or set in KUBEBUILDER_ASSETS.
	$(kube_assets)

.PHONY: node-assets
node-assets: ## Build also kubelet, kube-scheduler and kube-proxy.
	$(kube_assets) -node

kube_assets = @mkdir -p $(ARTIFACTS) && $(PROGRESS) "Building kube-assets" $(GO) build -o=$(ARTIFACTS)/ ./test/kube/cmd/kube-assets && $(ARTIFACTS)/kube-assets

.PHONY: demo
demo: ## Run talos-ccm on simulated machines: make demo [NODES=20] [KEEP=1].
	@mkdir -p $(ARTIFACTS)
	@$(PROGRESS) "Building talos-ccm and the demo" $(GO) build -o=$(ARTIFACTS)/ ./test/demo ./cmd/talos-ccm
	@$(ARTIFACTS)/demo $(if $(NODES),-nodes $(NODES)) $(if $(KEEP),-keep)

.PHONY: lint
lint: $(GOLANGCI_LINT) $(GOFUMPT) $(ACTIONLINT) ## Run the linters and check the formatting.
	@.ci/heartbeat "Linting" $(GOLANGCI_LINT) run --allow-parallel-runners ./...
	@cd test/bench && ../../.ci/heartbeat "Linting the benchmark" $(GOLANGCI_LINT) run --allow-parallel-runners ./...
	@unformatted=$$($(GOFUMPT) -l $(SOURCES)); [ -z "$$unformatted" ] || { echo "Not formatted, run make fmt:"; echo "$$unformatted"; exit 1; }
	$(ACTIONLINT) -shellcheck= -pyflakes=

.PHONY: generate
generate: ## Regenerate the JSON schemas, the RBAC of the chart, and the reference of the configuration file, metrics, Events and labels.
	$(GO) generate ./test/docs/...
	$(GO) test -count=1 ./test/chart -run Schema -update

.PHONY: fmt
fmt: $(GOLANGCI_LINT) $(GOFUMPT) ## Format all Go code.
	$(GOLANGCI_LINT) fmt ./... test/bench
	$(GOFUMPT) -w $(SOURCES)

# go vet compiles what the tests need, and shows its progress.
.PHONY: race
race: node-assets compiler ## Run the tests of concurrent code with the race detector.
	@list=$(concurrent); export CGO_ENABLED=1; \
		$(PROGRESS) "Compiling what the tests of concurrent code need, with the race detector" $(GO) vet -race $$list; \
		.ci/heartbeat "Testing concurrent code with the race detector" $(go_test) -race $$list

.PHONY: docs
docs: ## Check all links, commands and YAML blocks in the documentation.
	@$(GO) test -count=1 -v -run '^TestDocuments$$' ./test/docs

.PHONY: test
test: node-assets ## Run go vet and the tests that need only Go, with a real API server.
	@$(PROGRESS) "Running go vet, which compiles what the tests need" $(GO) vet ./...
	@list=$(call packages,-v '^[^ ]*/(packaging/image|test/chart|test/docs/patches) '); .ci/heartbeat "Testing" $(go_test) $$list
	@$(PROGRESS) "Running go vet on the benchmark" $(GO) -C test/bench vet .
	@.ci/heartbeat "Testing the benchmark" $(GO) -C test/bench test -vet=off -count=1 -timeout $(TEST_TIMEOUT) .

# Build first: without a build cache the build exceeds the timeout of packaging/image, whose tests need the binaries. The
# command for macOS is left to releases: code that only Linux compiles fails for Windows, too.
.PHONY: check
check: lint race build $(ARTIFACTS)/talos-ccm-windows-amd64.exe $(HELM) ## Run what `make test` leaves out: linters, race detector, other architectures, images, chart, patches in the documentation and monitoring.
	@.ci/heartbeat "Testing images, chart and patches" $(go_test) ./packaging/image ./test/chart ./test/docs/patches
	@$(PROGRESS) "Running go vet on the tests of alerts and dashboard, which compiles Prometheus" $(GO) -C test/monitoring/prometheus vet .
	@.ci/heartbeat "Testing alerts and dashboard" $(GO) -C test/monitoring/prometheus test -vet=off -count=1 -timeout $(TEST_TIMEOUT) .

.PHONY: histories
histories: ## Run random histories: 1,000 against the node and IPAM controllers, and 250 against the lifecycle controller.
	$(call histories_of,Controllers) 1000
	$(call histories_of,Lifecycle) 250

# The garbage collector would take a quarter of the time.
histories_of = GOGC=400 $(GO) test -count=1 -v -timeout $(TEST_TIMEOUT) -run '^Test$(1)_RandomHistories$$' ./test/simulation -histories

.PHONY: e2e
e2e: ## Run talos-ccm on two Talos machines with kubelets, its load balancers with kube-proxy, and Talos's code for clouds: make e2e [TALOS=1.14] [TALOS_SOURCE=checkout]; requires root.
	@.ci/packages nft=nftables iptables=iptables ip=iproute2
	@pkg-config --exists libseccomp 2>/dev/null || .ci/packages gcc libc6-dev pkg-config libseccomp-dev
	$(GO) run ./test/talos/cmd/talos-assets
	$(GO) test -tags e2e,$(TAGS) -v -count=1 -p 2 -timeout $(E2E_TIMEOUT) -skip '^TestFlannel_' ./test/platforms ./test/loadbalancer ./test/e2e
	$(GO) test -tags e2e,$(TAGS) -v -count=1 -timeout $(TEST_TIMEOUT) -run '^TestTakeover_' ./pkg/ccm

# Flannel's backend udp requires cgo.
.PHONY: flannel-test
flannel-test: node-assets compiler ## Run pods of two Nodes with Flannel and kube-proxy in podCIDRs from talos-ccm; requires root.
	@.ci/packages nft=nftables iptables=iptables ip=iproute2
	@CGO_ENABLED=1 $(PROGRESS) "Building flanneld" $(GO) -C test/flannel build -ldflags '-s -w' -o $(abspath $(ARTIFACTS))/flanneld github.com/flannel-io/flannel
	TALOS_CCM_FLANNELD=$(abspath $(ARTIFACTS))/flanneld $(GO) test -tags e2e,$(TAGS) -v -count=1 -timeout $(TEST_TIMEOUT) -run '^TestFlannel_' ./test/loadbalancer

# The tag ha selects tests for a bed with three control-plane machines. One of them builds an older version from the history,
# which a shallow clone does not have.
.PHONY: ha-test
ha-test: ## Run talos-ccm through the life of a cluster with three control-plane machines: make ha-test [RUN=regexp] [TALOS=1.14]; requires root.
	@.ci/packages ip=iproute2
	@pkg-config --exists libseccomp 2>/dev/null || .ci/packages gcc libc6-dev pkg-config libseccomp-dev
	$(GO) run ./test/talos/cmd/talos-assets
	$(GO) test -tags e2e,ha,$(TAGS) -v -count=1 -timeout $(HA_TIMEOUT) -run '$(or $(RUN),^TestHA_)' ./test/e2e

# The tag upgrade selects a test that builds the older version, too.
.PHONY: upgrade-test
upgrade-test: kube-assets ## Hand the lease over between an older version of talos-ccm and this one.
	$(GO) test -tags upgrade,$(TAGS) -v -count=1 -timeout $(TEST_TIMEOUT) -run '^TestUpgrade_' ./pkg/ccm

.PHONY: neighbors
neighbors: kube-assets ## Run talos-ccm next to the cloud controller manager of AWS, with a fake EC2 API.
	@$(PROGRESS) "Building the AWS cloud controller manager" $(GO) -C test/neighbors/aws build -ldflags '-s -w' -o $(abspath $(ARTIFACTS))/aws-cloud-controller-manager k8s.io/cloud-provider-aws/cmd/aws-cloud-controller-manager
	TALOS_CCM_AWS=$(abspath $(ARTIFACTS))/aws-cloud-controller-manager $(GO) test -tags e2e,$(TAGS) -v -count=1 -timeout $(TEST_TIMEOUT) ./test/neighbors

.PHONY: imager-test
imager-test: image ## Build an initramfs with the extension with the imager of Talos, and check it: make imager-test [TALOS=1.14] [TALOS_SOURCE=checkout].
	@.ci/packages mksquashfs=squashfs-tools cpio=cpio zstd=zstd
	$(GO) run ./test/talos/cmd/talos-assets -imager $(ARTIFACTS)/imager
	TALOS_CCM_IMAGER=$(abspath $(ARTIFACTS))/imager/imager TALOS_CCM_LAYOUT=$(abspath $(ARTIFACTS))/oci $(GO) test -tags e2e,$(TAGS) -v -count=1 -timeout $(TEST_TIMEOUT) -run '^TestImager_' ./test/imager

.PHONY: factory-test
factory-test: image ## Run the commands of the guide for a self-hosted Image Factory, and check the images that it builds.
	@.ci/packages mksquashfs=squashfs-tools cpio=cpio zstd=zstd curl=curl xz=xz-utils mcopy=mtools mkfs.vfat=dosfstools
	$(GO) -C test/factory build -ldflags '-s -w' -o $(abspath $(ARTIFACTS))/factory/ tool
	TALOS_CCM_FACTORY=$(abspath $(ARTIFACTS))/factory TALOS_CCM_LAYOUT=$(abspath $(ARTIFACTS))/oci $(GO) test -tags e2e,$(TAGS) -v -count=1 -timeout $(TEST_TIMEOUT) -run '^TestFactory_' ./test/imager

boot := $(ARTIFACTS)/boot

.PHONY: boot-test
boot-test: node-assets ## Boot, install, upgrade and reset Talos with the extension on an emulated machine with firmware and a kernel: make boot-test [RUN=regexp]; requires root.
	@.ci/packages qemu-system-x86_64=qemu-system-x86 mksquashfs=squashfs-tools cpio=cpio zstd=zstd xz=xz-utils depmod=kmod \
		mcopy=mtools mkfs.vfat=dosfstools objcopy=binutils
	@[ -e /usr/share/OVMF/OVMF_CODE_4M.fd ] || .ci/packages ovmf
	@pkg-config --exists libseccomp 2>/dev/null || .ci/packages gcc libc6-dev pkg-config libseccomp-dev
	$(MAKE) image ARCHES=amd64 ARTIFACTS=$(boot)
	$(MAKE) image ARCHES=amd64 ARTIFACTS=$(boot)/next TAG=v0.0.1-next
	$(GO) build -buildvcs=false -o $(boot)/preinit ./test/boot/preinit
	TALOS_CCM_ARTIFACTS=$(abspath $(boot)) $(GO) test -tags e2e,$(TAGS) -v -count=1 -timeout 2h $(if $(RUN),-run '$(RUN)') ./test/boot

# Those of the pure core in .golangci.yaml. Their results are the same on all architectures.
pure := $(addprefix ./pkg/,cidrset claims csrpolicy machine noderecord nodespec rules)

.PHONY: arm64-test
arm64-test: kube-assets $(ARTIFACTS)/talos-ccm-linux-arm64 ## Run talos-ccm for arm64 on simulated machines, and the tests of the pure core, in QEMU's user mode emulation.
	@.ci/packages qemu-aarch64=qemu-user
	GOARCH=arm64 $(GO) test -vet=off -count=1 -timeout $(TEST_TIMEOUT) -exec qemu-aarch64 $(pure)
	@$(PROGRESS) "Building the demo" $(GO) build -o=$(ARTIFACTS)/ ./test/demo
	@printf '#!/bin/sh\nexec qemu-aarch64 "%s" "$$@"\n' '$(abspath $(ARTIFACTS))/talos-ccm-linux-arm64' >$(ARTIFACTS)/talos-ccm-emulated
	@chmod +x $(ARTIFACTS)/talos-ccm-emulated
	$(ARTIFACTS)/demo -talos-ccm $(ARTIFACTS)/talos-ccm-emulated

.PHONY: fuzz
fuzz: ## Run the fuzz tests: make fuzz [FUZZTIME=10s] [FUZZ=regexp of directory and name].
	@grep -roE '^func Fuzz\w+' --include='*_test.go' cmd pkg | sed -E 's|^(.*)/[^/]*:func |./\1 |' | grep -E '$(FUZZ)' | sort | while read -r dir name; do \
		$(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$dir"; \
	done

# Run in this directory, because it builds talos-ccm.
build_bench = $(GO) -C test/bench build -o $(abspath $(ARTIFACTS))/bench .

.PHONY: bench
bench: kube-assets ## Measure talos-ccm beside other controllers: make bench [MACHINES=100,1000] [AGAINST=command] [BENCHFLAGS=-help].
	$(build_bench)
	$(ARTIFACTS)/bench $(if $(MACHINES),-machines $(MACHINES)) $(if $(AGAINST),-against '$(AGAINST)') $(BENCHFLAGS)

.PHONY: bench-smoke
bench-smoke: ## Run the benchmark with a few machines, and compare its results with those that are committed.
	$(MAKE) bench MACHINES=10 BENCHFLAGS='-parts pod-cidrs -settle 1s -rounds 1'
	$(MAKE) bench MACHINES=200 BENCHFLAGS='-parts nodes -settle 5s -rounds 1 -repeat 3 -compare test/bench/testdata/result.json $(if $(UPDATE),-update)'

.PHONY: faults
faults: kube-assets ## Run talos-ccm through faults and audit every write: make faults [MACHINES=300] [FAULT=text].
	$(build_bench)
	$(ARTIFACTS)/bench -machines $(or $(MACHINES),1000) -faults '$(or $(FAULT),all)'

.PHONY: soak
soak: kube-assets ## Change machines and watch memory and connections: make soak [MACHINES=300] [DURATION=10m] [BENCHFLAGS=-help].
	$(build_bench)
	$(ARTIFACTS)/bench -machines $(or $(MACHINES),1000) -soak $(or $(DURATION),30m) $(BENCHFLAGS)

.PHONY: microbench
microbench: ## Run the benchmarks of packages: make microbench [BENCH=regexp].
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./...

# A test compares the version in vars.yaml with all other places.
.PHONY: release-tag
release-tag:
	@version=v$$(sed -n 's/^VERSION: //p' vars.yaml); [ '$(TAG)' = "$$version" ] || { echo "tag is $(TAG), but the version in vars.yaml is $$version"; exit 1; }

.PHONY: release-tree
release-tree:
	@[ -z "$$(git status --porcelain)" ] || { echo "Uncommitted changes:"; git status --short; exit 1; }

.PHONY: release-artifacts
release-artifacts: release-tag release-tree image cli sbom chart ## Build the release artifacts with checksums in _out/release. TAG must match vars.yaml.
	rm -rf $(ARTIFACTS)/release
	mkdir -p $(ARTIFACTS)/release
	cp $(ARCHES:%=$(ARTIFACTS)/talos-ccm-linux-%) $(CLIS) $(ARTIFACTS)/talos-ccm.spdx.json $(ARTIFACTS)/chart/talos-ccm*.* $(ARTIFACTS)/release
	cd $(ARTIFACTS)/release && sums=$$(sha256sum *) && sha512sum * >sha512sum.txt && echo "$$sums" >sha256sum.txt

# Not part of the tests, whose result must not change when a module is released.
.PHONY: outdated
outdated: ## Check that direct dependencies are the newest releases, unless a comment in go.mod has the reason.
	@$(GO) list -m -u -e -f '{{if not (or .Main .Indirect)}}{{.Path}} {{.Version}} {{if .Error}}unknown{{end}}{{with .Update}}{{.Version}}{{end}}{{end}}' all | { \
		failed=0; while read -r path version newest; do case $$newest in \
			'') ;; \
			unknown) echo "$$path $$version: the module proxy does not list its releases" ;; \
			*) grep -qF "$$path $$version // " go.mod || { echo "$$path $$version: $$newest is newer"; failed=1; } ;; \
		esac; done; exit $$failed; }

.PHONY: vulncheck
vulncheck: ## Check the binary for known vulnerabilities (queries vuln.go.dev).
	$(GO) run golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK_VERSION) ./cmd/...

.PHONY: commits
commits: ## Check commit messages: make commits SINCE=origin/main.
	@.ci/commits '$(SINCE)'

.PHONY: clean
clean: ## Remove _out, but not the cache.
	rm -rf $(ARTIFACTS)

# The race detector requires a C compiler.
.PHONY: compiler
compiler:
	@.ci/compiler

# GOFLAGS of the user may not apply outside the module.
go_install = @cd / && GOFLAGS=-trimpath GOBIN=$(@D) $(PROGRESS) "Building $(notdir $(@D))" $(GO) install

$(GOLANGCI_LINT):
	$(go_install) github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)

$(GOFUMPT):
	$(go_install) mvdan.cc/gofumpt@$(GOFUMPT_VERSION)

$(HELM):
	$(go_install) helm.sh/helm/v4/cmd/helm@$(HELM_VERSION)

$(ACTIONLINT):
	$(go_install) github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT_VERSION)
