// Package version says which talos-ccm this is: on the command line, in the log, as a metric and to the API servers it talks to.
package version

import "runtime"

// version is set by the linker: -X github.com/talos-ccm/talos-ccm/pkg/version.version=v1.2.3.
var version = "v0.0.0-dev"

// Version is the version that talos-ccm was built as, with its leading v; v0.0.0-dev if the build did not say.
func Version() string { return version }

// UserAgent is what the controllers call themselves to the API server: name, version and platform. The framework's own clients, for informers and the lease,
// have client-go's.
func UserAgent() string {
	return "talos-ccm/" + version + " (" + runtime.GOOS + "/" + runtime.GOARCH + ")"
}
