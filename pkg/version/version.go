// Package version has the version of talos-ccm.
package version

import (
	"runtime"
	"runtime/debug"
)

// version is set by the linker: -X github.com/talos-ccm/talos-ccm/pkg/version.version=v1.2.3.
var version = "v0.0.0-dev"

// Version returns the version with a leading v; v0.0.0-dev if the build did not set it.
func Version() string { return version }

// UserAgent returns the user agent of the controllers' Kubernetes clients. The framework's own clients, for informers
// and the lease, use client-go's default.
func UserAgent() string {
	return "talos-ccm/" + version + " (" + runtime.GOOS + "/" + runtime.GOARCH + ")"
}

// Details returns the version, and what the program was built from, with and for. Releases are built without the commit,
// which their version identifies.
func Details() string {
	details := runtime.Version() + ", " + runtime.GOOS + "/" + runtime.GOARCH

	if info, ok := debug.ReadBuildInfo(); ok {
		for _, setting := range info.Settings {
			if setting.Key == "vcs.revision" {
				details = "commit " + setting.Value + ", " + details
			}
		}
	}

	return version + " (" + details + ")"
}
