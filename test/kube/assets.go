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
	assetsEnv = "KUBEBUILDER_ASSETS"

	// KubernetesVersion is the version of the components in their go.mod.
	KubernetesVersion = "v1.37.2"

	// modfile is the go.mod that the components were built with, and sumfile its go.sum.
	modfile = "components.mod"
	sumfile = "components.sum"
)

// binary is a multi-call binary.
type binary struct {
	name       string
	components []string
	tags       string
}

// Most tests and the demo need only a control plane without a scheduler. grpcnotrace is the tag of talos-ccm's builds, with
// which they share packages.
var (
	controlPlane = binary{"kube-control-plane", []string{"etcd", apiServer, controllerManager}, "-tags=grpcnotrace"}
	node         = binary{"kube-node", []string{"kube-scheduler", kubelet, "kube-proxy"}, "-tags=grpcnotrace,node"}
)

// AssetsOf returns the directory with the executables of etcd, kube-apiserver and kube-controller-manager of a version, by
// their names: the one that KUBEBUILDER_ASSETS names, or else a directory of the cache. If it does not exist, AssetsOf builds the
// components: once, even if several processes request it. That takes minutes, and reports its progress unless that is nil.
func AssetsOf(ctx context.Context, version string, progress io.Writer) (string, error) {
	if directory := os.Getenv(assetsEnv); directory != "" {
		for _, name := range controlPlane.components {
			if _, err := exec.LookPath(filepath.Join(directory, name)); err != nil {
				return "", fmt.Errorf("%w (unset KUBEBUILDER_ASSETS to build the components)", err)
			}
		}

		return directory, nil
	}

	return cached(ctx, version, progress, controlPlane, "")
}

// NodeAssetsOf is [AssetsOf] with kubelet, kube-scheduler and kube-proxy in the directory, too.
func NodeAssetsOf(ctx context.Context, version string, progress io.Writer) (string, error) {
	directory, err := AssetsOf(ctx, version, progress)
	if err != nil || os.Getenv(assetsEnv) != "" {
		return directory, err
	}

	return cached(ctx, version, progress, node, directory)
}

// cached returns the directory of the cache with a binary. If base is set, the directory also has the control plane of base.
func cached(ctx context.Context, version string, progress io.Writer, b binary, base string) (string, error) {
	source, err := findSource(ctx, version)
	if err != nil {
		return "", fmt.Errorf("find the source of the Kubernetes components: %w", err)
	}

	directory, err := builder.Cached(ctx, b.name, source.key, progress, func(directory string) error {
		if base != "" {
			// A link to a path in the other directory would break when that is removed, or in an image.
			err := os.Link(filepath.Join(base, controlPlane.name), filepath.Join(directory, controlPlane.name))
			if err = errors.Join(err, controlPlane.link(directory)); err != nil {
				return err
			}
		}

		return errors.Join(b.link(directory), source.build(ctx, directory, b, progress))
	})
	if err != nil {
		return "", fmt.Errorf("build the Kubernetes components: %w", err)
	}

	return directory, nil
}

// link creates the names of the components in the directory of the binary.
func (b binary) link(directory string) (err error) {
	for _, name := range b.components {
		err = errors.Join(err, os.Symlink(b.name, filepath.Join(directory, name)))
	}

	return err
}

// source is the nested module of the components.
type source struct {
	directory string
	// version of Kubernetes.
	version string
	// module is the go.mod for that version.
	module []byte
	// key changes with everything that the binaries are made of.
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

	goVersion, err := builder.Output(goCommand(ctx, s.directory, "version"))
	if err != nil {
		return s, err
	}

	sum := sha256.New()
	fmt.Fprintf(sum, "%q%q%q%q%+v", s.module, goVersion, buildFlags(version), buildEnv(), []binary{controlPlane, node})

	files, _ := filepath.Glob(filepath.Join(s.directory, "*.go")) // the pattern is valid

	for _, file := range files {
		code, err := os.ReadFile(file)
		if err != nil {
			return s, err
		}

		fmt.Fprintf(sum, "%q", code)
	}

	s.key = hex.EncodeToString(sum.Sum(nil))[:16]

	return s, nil
}

// root returns the path of a file in the root directory of the repository.
func (s source) root(name string) string { return filepath.Join(s.directory, "../../..", name) }

// requirement matches a required module and its version in a go.mod.
var requirement = regexp.MustCompile(`(?m)^\t(\S+) (v\S+)`)

// follows matches modules whose API changes with the versions of Kubernetes.
var follows = regexp.MustCompile(`k8s\.io/|github\.com/google/cadvisor|github\.com/container-storage-interface|github\.com/opencontainers/cgroups`)

// moduleOf returns the components' go.mod with a version of Kubernetes. Modules that follow this version and are only
// required indirectly are left to go: it adds what that version requires. The same holds for etcd, if it is not the version in
// the file.
//
// With KubernetesVersion, other modules have the versions of talos-ccm's go.mod. A package is compiled once for both only if
// all its dependencies are the same, and most of the packages of talos-ccm are packages of Kubernetes.
func (s source) moduleOf(version string) (module []byte, err error) {
	content, err := os.ReadFile(filepath.Join(s.directory, "go.mod"))
	if err != nil {
		return nil, err
	}

	product, err := os.ReadFile(s.root("go.mod"))
	if err != nil {
		return nil, err
	}

	versions := map[string]string{}

	for _, match := range requirement.FindAllStringSubmatch(string(product), -1) {
		if version == KubernetesVersion {
			versions[match[1]] = match[2]
		}
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
		} else if match := requirement.FindStringSubmatch(line); match != nil && versions[match[1]] != "" {
			line = strings.Replace(line, match[2], versions[match[1]], 1)
		}

		module = append(module, line...)
	}

	return module, nil
}

// build builds a binary into a directory.
func (s source) build(ctx context.Context, directory string, b binary, progress io.Writer) error {
	sums, err := os.ReadFile(filepath.Join(s.directory, "go.sum"))
	if err != nil {
		return err
	}

	productSums, err := os.ReadFile(s.root("go.sum"))
	if err != nil {
		return err
	}

	err = errors.Join(
		os.WriteFile(filepath.Join(directory, modfile), s.module, 0o644),
		os.WriteFile(filepath.Join(directory, sumfile), append(sums, productSums...), 0o644),
	)
	if err != nil {
		return err
	}

	args := slices.Concat([]string{"build", "-o=" + filepath.Join(directory, b.name), "-modfile=" + filepath.Join(directory, modfile), b.tags},
		buildFlags(s.version), []string{"."})

	return builder.Packages(progress, "Building "+strings.Join(b.components, ", ")+" "+s.version+" (once)", goCommand(ctx, s.directory, args...))
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
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = process.Grace

	return cmd
}
