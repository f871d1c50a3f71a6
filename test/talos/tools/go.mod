// Programs of the Talos test bed. A nested module, so that their build does not depend on talos-ccm.
module github.com/talos-ccm/talos-ccm/test/talos/tools

go 1.26.1

require (
	github.com/moby/sys/capability v0.4.0
	github.com/opencontainers/runtime-spec v1.3.0
	golang.org/x/sys v0.45.0
)
