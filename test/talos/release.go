package talos

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// releaseEnv selects a release by its minor version. sourceEnv is the directory of a checkout of the release.
	releaseEnv = "TALOS"
	sourceEnv  = "TALOS_SOURCE"

	defaultMinor = "1.14"

	talosModule     = "github.com/siderolabs/talos"
	machineryModule = talosModule + "/pkg/machinery"
	// tagFile is the file with the version of a checkout.
	tagFile = "pkg/machinery/gendata/data/tag"
)

// Release is a release of Talos that the bed can boot.
type Release struct {
	// Minor is the minor version, which selects the release: make e2e TALOS=1.13.
	Minor string
	// Talos is the version of Talos. Its source is in the Go module proxy, or in the checkout in TALOS_SOURCE.
	Talos string
	// Kubernetes is the version of Kubernetes that the machines run.
	Kubernetes string
	// Replace contains replacements, in the format of go mod edit -replace, for modules in Talos's go.mod that the module
	// proxy lacks. Most of these modules are forks. The replacements are other versions or upstream.
	Replace []string
	// Patches are for modules of which the module proxy has only a version that lacks something.
	Patches []Patch
	// Missing lists the modules that the module proxy lacks and that have no replacement. If it is not empty, a checkout is
	// required, whose go.mod replaces these modules by directories.
	Missing string
}

// Patch edits one file of a module, which then replaces all versions of the module.
type Patch struct {
	// Module and Version are in the module proxy. File is a path in the module.
	Module, Version, File string
	// Edits are pairs of old and new text, for strings.NewReplacer.
	Edits []string
}

// Releases returns all releases that the bed can boot, the oldest first.
func Releases() []Release {
	const containerd = "github.com/containerd/containerd/v2=github.com/containerd/containerd/v2@v2.2.5"

	return []Release{
		{
			Minor: "1.12", Talos: "v1.12.11", Kubernetes: "v1.35.4",
			Replace: []string{containerd, "github.com/neticdk/go-stdlib=github.com/neticdk/go-stdlib@v1.0.1"},
			Missing: talosModule + " v1.12.11, " + machineryModule + " v1.12.11",
		},
		{
			Minor: "1.13", Talos: "v1.13.9", Kubernetes: "v1.36.3",
			Replace: []string{
				containerd,
				"github.com/siderolabs/go-kubernetes=github.com/siderolabs/go-kubernetes@v0.2.39",
				"go.etcd.io/etcd/etcdutl/v3=go.etcd.io/etcd/etcdutl/v3@v3.6.10",
			},
		},
		{
			Minor: defaultMinor, Talos: "v1.14.1", Kubernetes: kube.KubernetesVersion,
			Replace: []string{
				"github.com/cosi-project/runtime=github.com/cosi-project/runtime@v1.16.2",
				"github.com/mdlayher/ethtool=github.com/siderolabs/ethtool@v0.4.0-sidero",
				"github.com/secure-io/siv-go=github.com/secure-io/siv-go@v0.0.0-20180922214919-5ff40651e2c4",
			},
			// Talos's version has routes whose gateway is of the other address family. The bed has no such routes, so that the
			// declarations are enough.
			Patches: []Patch{{
				Module: "github.com/jsimonetti/rtnetlink/v2", Version: "v2.2.1-0.20260614152944-ab8601692836", File: "route.go",
				Edits: []string{
					"type RouteAttributes struct {", "type RouteVia struct {\nFamily uint16\nAddr net.IP\n}\n\ntype RouteAttributes struct {\nVia *RouteVia",
					"type NextHop struct {", "type NextHop struct {\nVia *RouteVia",
				},
			}},
		},
	}
}

// source is the source of a release.
type source struct {
	Release
	// checkout is the directory of a checkout. If it is empty, the source is in the module proxy.
	checkout string
}

// selectSource returns the release with a minor version, or, if that is empty, the release that TALOS selects, with the
// checkout in TALOS_SOURCE. It returns an error if the release requires a checkout and has none, or if the checkout is not of
// this release.
func selectSource(minor string) (source, error) {
	var checkout string
	if minor == "" {
		minor, checkout = cmp.Or(os.Getenv(releaseEnv), defaultMinor), os.Getenv(sourceEnv)
	}

	releases := Releases()

	i := slices.IndexFunc(releases, func(r Release) bool { return r.Minor == minor })
	if i < 0 {
		var minors []string
		for _, r := range releases {
			minors = append(minors, r.Minor)
		}

		return source{}, fmt.Errorf("%s=%s is not supported; supported: %s", releaseEnv, minor, strings.Join(minors, ", "))
	}

	release := releases[i]

	if checkout == "" {
		if release.Missing != "" {
			return source{}, fmt.Errorf("%s=%s needs %s, the directory of a checkout of Talos %s, because the module proxy lacks %s (docs/development.md)",
				releaseEnv, minor, sourceEnv, release.Talos, release.Missing)
		}

		return source{Release: release}, nil
	}

	checkout, err := filepath.Abs(checkout)
	if err != nil {
		return source{}, fmt.Errorf("resolve %s: %w", sourceEnv, err)
	}

	tag, err := os.ReadFile(filepath.Join(checkout, tagFile))

	switch got := strings.TrimSpace(string(tag)); {
	case errors.Is(err, fs.ErrNotExist):
		return source{}, fmt.Errorf("%s=%s is no checkout of Talos: it has no %s", sourceEnv, checkout, tagFile)
	case err != nil:
		return source{}, fmt.Errorf("read tag of %s: %w", sourceEnv, err)
	case got != release.Talos:
		return source{}, fmt.Errorf("%s=%s is a checkout of Talos %s; %s=%s needs %s", sourceEnv, checkout, got, releaseEnv, minor, release.Talos)
	}

	return source{Release: release, checkout: checkout}, nil
}

// open returns the directory with the source. It writes Talos's go.mod with the replacements to the file modfile, and
// Talos's go.sum to the same directory.
func (s source) open(ctx context.Context, modfile string) (dir string, err error) {
	dir, edit := s.checkout, []string{"mod", "edit"}

	for _, replacement := range s.Replace {
		edit = append(edit, "-replace="+replacement)
	}

	if s.checkout == "" {
		if dir, err = download(ctx, talosModule+"@"+s.Talos); err != nil {
			return "", err
		}

		// Talos's go.mod replaces this module by a directory that only a checkout has.
		edit = append(edit, "-replace="+machineryModule+"="+machineryModule+"@"+s.Talos)
	}

	for _, patch := range s.Patches {
		patched, err := patch.apply(ctx, filepath.Dir(modfile))
		if err != nil {
			return "", err
		}

		edit = append(edit, "-replace="+patch.Module+"="+patched)
	}

	for from, to := range map[string]string{"go.mod": modfile, "go.sum": strings.TrimSuffix(modfile, ".mod") + ".sum"} {
		content, err := os.ReadFile(filepath.Join(dir, from))
		if err := errors.Join(err, os.WriteFile(to, content, 0o644)); err != nil {
			return "", fmt.Errorf("copy %s of Talos: %w", from, err)
		}
	}

	_, err = builder.Output(exec.CommandContext(ctx, "go", append(edit, modfile)...))

	return dir, err
}

// apply writes the patched module to a directory in dir, and returns its path.
func (p Patch) apply(ctx context.Context, dir string) (string, error) {
	original, err := download(ctx, p.Module+"@"+p.Version)
	if err != nil {
		return "", err
	}

	dir = filepath.Join(dir, "patched", filepath.FromSlash(p.Module))
	if err := os.CopyFS(dir, os.DirFS(original)); err != nil {
		return "", fmt.Errorf("copy %s: %w", p.Module, err)
	}

	file := filepath.Join(dir, p.File)

	content, err := os.ReadFile(file)
	content = []byte(strings.NewReplacer(p.Edits...).Replace(string(content)))

	if err := errors.Join(err, os.WriteFile(file, content, 0o644)); err != nil {
		return "", fmt.Errorf("patch %s: %w", p.Module, err)
	}

	return dir, nil
}

// download downloads a module, and returns its directory in the module cache.
func download(ctx context.Context, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir = os.TempDir()
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOTOOLCHAIN=local", "GOWORK=off")

	// go prints errors to its standard output.
	out, err := cmd.Output()

	var downloaded struct{ Dir, Error string }
	if err := errors.Join(err, json.Unmarshal(out, &downloaded)); err != nil {
		return "", fmt.Errorf("download %s: %w: %s", module, err, downloaded.Error)
	}

	return downloaded.Dir, nil
}
