// What the test bed runs besides Talos. A module of its own, so that building it does not depend on the product.
module github.com/talos-ccm/talos-ccm/test/talos/tools

go 1.26.1

require (
	github.com/moby/sys/capability v0.4.0
	golang.org/x/sys v0.45.0
)

replace github.com/petermattis/goid => github.com/petermattis/goid v0.0.0-20240813172612-4fcff4a6cae7
