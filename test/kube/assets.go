package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

const (
	assetsEnv = "KUBEBUILDER_ASSETS"
	cacheEnv  = "TALOS_CCM_CACHE"

	// KubernetesVersion is the version of the components in their go.mod.
	KubernetesVersion = "v1.36.3"

	multiCall = "kube-components"
	// modfile is the go.mod that the components were built with, and sumfile its go.sum.
	modfile = "components.mod"
	sumfile = "components.sum"
	// keptAssets is how many builds the cache keeps besides those used within assetsTTL.
	keptAssets = 2
	assetsTTL  = 24 * time.Hour
)

var (
	// required are the components that a control plane needs; a folder named by KUBEBUILDER_ASSETS often has no more.
	required = []string{"etcd", apiServer, controllerManager}
	// built are the components of the multi-call binary.
	built = []string{"etcd", apiServer, controllerManager, "kube-scheduler", kubelet, "kube-proxy"}
)

// Assets is AssetsOf with KubernetesVersion.
func Assets(ctx context.Context, progress io.Writer) (string, error) {
	return AssetsOf(ctx, KubernetesVersion, progress)
}

// AssetsOf is the folder with the executables of the components of a version, by their names: the one that KUBEBUILDER_ASSETS names, or else a folder of the
// cache, which is filled first if need be. Such a build takes minutes, tells its progress (nil: silence), and happens once, however many
// processes ask for it at the same time.
//
// The cache is TALOS_CCM_CACHE, or talos-ccm in the user's cache folder.
func AssetsOf(ctx context.Context, version string, progress io.Writer) (string, error) {
	if folder := os.Getenv(assetsEnv); folder != "" {
		return folder, checkAssets(folder)
	}

	source, err := findSource(ctx, version)
	if err != nil {
		return "", fmt.Errorf("find the source of the Kubernetes components: %w", err)
	}

	cache, err := cacheFolder()
	if err != nil {
		return "", fmt.Errorf("find the cache for the Kubernetes components: %w", err)
	}

	folder, err := source.buildInto(ctx, cache, progress)
	if err != nil {
		return "", fmt.Errorf("build the Kubernetes components: %w", err)
	}

	return folder, nil
}

// checkAssets fails unless the folder holds what a control plane needs.
func checkAssets(folder string) error {
	var missing []string

	for _, name := range required {
		info, err := os.Stat(filepath.Join(folder, name))
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			missing = append(missing, name)
		}
	}

	if len(missing) > 0 {
		return fmt.Errorf("%s=%s: not there, or not executable: %s (unset %s to build them)",
			assetsEnv, folder, strings.Join(missing, ", "), assetsEnv)
	}

	return nil
}

func cacheFolder() (string, error) {
	if folder := os.Getenv(cacheEnv); folder != "" {
		return filepath.Join(folder, "kube"), nil
	}

	folder, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("%w (or set %s)", err, cacheEnv)
	}

	return filepath.Join(folder, "talos-ccm", "kube"), nil
}

// source is the nested module of the components.
type source struct {
	folder string
	// version of Kubernetes.
	version string
	// key changes with everything that the executable is made of.
	key string
}

// findSource finds the module in the checkout that this package was compiled from. If that is unknown, as after a build with -trimpath,
// or gone, the working directory must be in a checkout.
func findSource(ctx context.Context, version string) (source, error) {
	_, file, _, _ := runtime.Caller(0)
	folder := filepath.Dir(file)

	if _, err := os.Stat(file); err != nil || !filepath.IsAbs(file) {
		output, err := goCommand(ctx, ".", "list", "-find", "-f", "{{.Dir}}", "github.com/talos-ccm/talos-ccm/test/kube").Output()
		if err != nil {
			return source{}, fmt.Errorf("go list in the working directory: %w", withStderr(err))
		}

		folder = strings.TrimSpace(string(output))
	}

	s := source{folder: filepath.Join(folder, "components"), version: version}

	var err error

	s.key, err = s.hash(ctx)

	return s, err
}

func (s source) hash(ctx context.Context) (string, error) {
	module, err := s.module()
	if err != nil {
		return "", err
	}

	sum := sha256.New()
	io.WriteString(sum, module) //nolint:errcheck // never fails

	for _, name := range []string{"go.sum", "main.go"} {
		content, err := os.ReadFile(filepath.Join(s.folder, name))
		if err != nil {
			return "", err
		}

		fmt.Fprintf(sum, "%s %d\n%s", name, len(content), content)
	}

	goVersion, err := goCommand(ctx, s.folder, "version").Output()
	if err != nil {
		return "", fmt.Errorf("go version: %w", withStderr(err))
	}

	fmt.Fprintf(sum, "%s%q%q", goVersion, buildFlags(s.version), buildEnv())

	return hex.EncodeToString(sum.Sum(nil))[:16], nil
}

// buildInto returns the folder of the cache with this source's executables, after building them if it does not exist. Old builds are removed.
func (s source) buildInto(ctx context.Context, cache string, progress io.Writer) (string, error) {
	folder := filepath.Join(cache, s.key)
	if used(folder) {
		return folder, nil
	}

	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}

	unlock, err := lockFile(ctx, filepath.Join(cache, "lock"), func() {
		report(progress, "Waiting for another process that builds the Kubernetes components")
	})
	if err != nil {
		return "", err
	}
	defer unlock()

	if used(folder) { // the previous holder of the lock built it
		return folder, nil
	}

	if err := s.buildAs(ctx, folder, progress); err != nil {
		return "", err
	}

	return folder, prune(cache)
}

// buildAs makes the folder, complete or not at all.
func (s source) buildAs(ctx context.Context, folder string, progress io.Writer) error {
	unfinished, err := os.MkdirTemp(filepath.Dir(folder), "unfinished-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(unfinished) //nolint:errcheck // after success it is gone, after an error that one counts

	if err := s.writeModfile(unfinished); err != nil {
		return err
	}

	if err := s.compile(ctx, unfinished, progress); err != nil {
		return err
	}

	for _, name := range built {
		if err := os.Symlink(multiCall, filepath.Join(unfinished, name)); err != nil {
			return err
		}
	}

	if err := os.Chmod(unfinished, 0o755); err != nil {
		return err
	}

	// It exists only if the executable was removed from it.
	if err := os.RemoveAll(folder); err != nil {
		return err
	}

	return os.Rename(unfinished, folder)
}

// used tells whether the folder holds a build, and marks it as used now.
func used(folder string) bool {
	if _, err := os.Stat(filepath.Join(folder, multiCall)); err != nil {
		return false
	}

	now := time.Now()
	_ = os.Chtimes(folder, now, now)

	return true
}

// prune removes builds beyond keptAssets that were not used within assetsTTL, and leftovers of interrupted builds. The
// caller holds the cache's lock.
func prune(cache string) error {
	entries, err := os.ReadDir(cache)
	if err != nil {
		return err
	}

	var folders []os.FileInfo

	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && info.IsDir() {
			folders = append(folders, info)
		}
	}

	slices.SortFunc(folders, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })

	for i, info := range folders {
		unfinished := strings.HasPrefix(info.Name(), "unfinished-")
		old := i >= keptAssets && time.Since(info.ModTime()) > assetsTTL

		if !unfinished && !old {
			continue
		}

		if err := os.RemoveAll(filepath.Join(cache, info.Name())); err != nil {
			return err
		}
	}

	return nil
}

// goCommand is the go command in folder, with no more of the caller's settings than where modules come from.
func goCommand(ctx context.Context, folder string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), buildEnv()...)
	// Interrupted, go removes its temporary files; killed, it does not.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = stopGrace

	return cmd
}
