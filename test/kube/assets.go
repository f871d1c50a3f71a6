package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/process"
)

const (
	// KubernetesVersion is the version of the components in their go.mod.
	KubernetesVersion = "v1.37.2"

	multiCall = "kube-components"
	// modfile is the go.mod that the components were built with, and sumfile its go.sum.
	modfile = "components.mod"
	sumfile = "components.sum"
)

var (
	// required are the components of a control plane.
	required = []string{"etcd", apiServer, controllerManager}
	// built are the components of the multi-call binary.
	built = slices.Concat(required, []string{"kube-scheduler", kubelet, "kube-proxy"})
)

// AssetsOf returns the directory with the executables of the components of a version, by their names: the one that
// KUBEBUILDER_ASSETS names, or else a directory of the cache, which is filled first if need be. Such a build takes minutes,
// reports its progress unless that is nil, and happens once, however many processes ask for it at the same time.
func AssetsOf(ctx context.Context, version string, progress io.Writer) (string, error) {
	if directory := os.Getenv("KUBEBUILDER_ASSETS"); directory != "" {
		for _, name := range required {
			if _, err := exec.LookPath(filepath.Join(directory, name)); err != nil {
				return "", fmt.Errorf("%w (unset KUBEBUILDER_ASSETS to build the components)", err)
			}
		}

		return directory, nil
	}

	source, err := findSource(ctx, version)
	if err != nil {
		return "", fmt.Errorf("find the source of the Kubernetes components: %w", err)
	}

	directory, err := builder.Cached(ctx, "kube", source.key, progress, func(directory string) error { return source.build(ctx, directory, progress) })
	if err != nil {
		return "", fmt.Errorf("build the Kubernetes components: %w", err)
	}

	return directory, nil
}

// source is the nested module of the components.
type source struct {
	directory string
	// version of Kubernetes.
	version string
	// module is the go.mod for that version, and sums the go.sum.
	module, sums []byte
	// key changes with everything that the executable is made of.
	key string
}

// findSource finds the module in the checkout of the working directory.
func findSource(ctx context.Context, version string) (s source, err error) {
	parent, err := builder.PackageDir(ctx, "github.com/talos-ccm/talos-ccm/test/kube")
	if err != nil {
		return s, err
	}

	s = source{version: version, directory: filepath.Join(parent, "components")}

	if s.module, err = s.moduleOf(version); err != nil {
		return s, err
	}

	if s.sums, err = os.ReadFile(filepath.Join(s.directory, "go.sum")); err != nil {
		return s, err
	}

	code, err := os.ReadFile(filepath.Join(s.directory, "main.go"))
	if err != nil {
		return s, err
	}

	goVersion, err := builder.Output(goCommand(ctx, s.directory, "version"))
	if err != nil {
		return s, err
	}

	sum := sha256.Sum256(fmt.Appendf(nil, "%sgo.sum %d\n%smain.go %d\n%s%s%q%q",
		s.module, len(s.sums), s.sums, len(code), code, goVersion, buildFlags(version), buildEnv()))
	s.key = hex.EncodeToString(sum[:])[:16]

	return s, nil
}

// follows matches modules whose API changes with the versions of Kubernetes.
var follows = regexp.MustCompile(`k8s\.io/|github\.com/google/cadvisor|github\.com/container-storage-interface|github\.com/opencontainers/cgroups`)

// moduleOf returns the components' go.mod with a version of Kubernetes. Modules that follow this version and are only
// required indirectly are left to go: it adds what that version requires. The same holds for etcd, if it is not the version in
// the file.
func (s source) moduleOf(version string) (module []byte, err error) {
	content, err := os.ReadFile(filepath.Join(s.directory, "go.mod"))
	if err != nil {
		return nil, err
	}

	for line := range strings.Lines(string(content)) {
		// Older versions of Talos set flags that newer versions of etcd do not have.
		if version != KubernetesVersion && strings.Contains(line, "go.etcd.io/") {
			continue
		}

		if follows.MatchString(line) {
			if strings.Contains(line, "// indirect") {
				continue
			}

			// The staging modules of v1.37.2 are v0.37.2.
			line = strings.ReplaceAll(line, strings.TrimPrefix(KubernetesVersion, "v1"), strings.TrimPrefix(version, "v1"))
		}

		module = append(module, line...)
	}

	return module, nil
}

// build builds the components into a directory.
func (s source) build(ctx context.Context, directory string, progress io.Writer) error {
	err := errors.Join(
		os.WriteFile(filepath.Join(directory, modfile), s.module, 0o644),
		os.WriteFile(filepath.Join(directory, sumfile), s.sums, 0o644),
	)
	for _, name := range built {
		err = errors.Join(err, os.Symlink(multiCall, filepath.Join(directory, name)))
	}

	if err != nil {
		return err
	}

	args := append([]string{"build", "-o=" + filepath.Join(directory, multiCall), "-modfile=" + filepath.Join(directory, modfile)}, buildFlags(s.version)...)

	return builder.Packages(progress, "Building the Kubernetes "+s.version+" components (once)", goCommand(ctx, s.directory, append(args, ".")...))
}

func buildEnv() []string {
	return []string{"GOFLAGS=-mod=mod -buildvcs=false", "GOTOOLCHAIN=local", "GOWORK=off", "CGO_ENABLED=0"}
}

// buildFlags give the components the version that a release has: a kubelet or an API server of version v0.0.0-master is
// treated as ancient.
func buildFlags(version string) []string {
	const versionPackage = "k8s.io/component-base/version"

	parts := strings.Split(strings.TrimPrefix(version, "v"), ".")
	ldflags := []string{"-s", "-w"}

	for _, variable := range []string{
		versionPackage + ".gitVersion=" + version,
		versionPackage + ".gitMajor=" + parts[0],
		versionPackage + ".gitMinor=" + parts[1],
		versionPackage + ".gitTreeState=clean",
		versionPackage + ".buildDate=1970-01-01T00:00:00Z",
		"k8s.io/client-go/pkg/version.gitVersion=" + version,
	} {
		ldflags = append(ldflags, "-X", variable)
	}

	return []string{"-trimpath", "-ldflags=" + strings.Join(ldflags, " ")}
}

// goCommand is the go command in directory, with no more of the caller's settings than where modules come from.
func goCommand(ctx context.Context, directory string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = directory
	cmd.Env = append(os.Environ(), buildEnv()...)
	// Interrupted, go removes its temporary files; killed, it does not.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = process.Grace

	return cmd
}
