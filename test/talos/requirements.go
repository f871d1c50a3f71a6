package talos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNotRoot is what Up returns to a caller that may not make namespaces.
var ErrNotRoot = errors.New("the Talos test bed makes namespaces, mounts and cgroups: it must run as root (for instance with sudo)")

// requirement is something that the bed needs from the operating system, and the Debian package that brings it.
type requirement struct {
	pkg     string
	present func(ctx context.Context) bool
}

func program(name string) func(context.Context) bool {
	return func(context.Context) bool {
		_, err := exec.LookPath(name)

		return err == nil
	}
}

// buildRequirements are needed to build runc: a C compiler and a library to link statically.
func buildRequirements() []requirement {
	return []requirement{
		{"gcc", program("gcc")},
		{"libc6-dev", func(ctx context.Context) bool { return finds(ctx, "libc.a") }},
		{"pkg-config", program("pkg-config")},
		{"libseccomp-dev", func(ctx context.Context) bool { return finds(ctx, "libseccomp.a") }},
	}
}

// runRequirements are needed to bring up a bed.
func runRequirements() []requirement {
	return []requirement{{"iproute2", program("ip")}}
}

// finds reports whether the C compiler finds a library: it then prints a path, otherwise only the name.
func finds(ctx context.Context, library string) bool {
	out, err := exec.CommandContext(ctx, "gcc", "-print-file-name="+library).Output()

	return err == nil && strings.ContainsRune(string(out), '/')
}

func requireRoot() error {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return fmt.Errorf("the Talos test bed needs linux/amd64, this is %s/%s", runtime.GOOS, runtime.GOARCH)
	}

	if os.Geteuid() != 0 || !holds(unix.CAP_SYS_ADMIN) {
		return ErrNotRoot
	}

	return nil
}

// requirePackages installs what is missing to build.
func requirePackages(ctx context.Context, out io.Writer) error {
	return install(ctx, out, buildRequirements())
}

func install(ctx context.Context, out io.Writer, requirements []requirement) error {
	var missing []string

	for _, r := range requirements {
		if !r.present(ctx) {
			missing = append(missing, r.pkg)
		}
	}

	if len(missing) == 0 {
		return nil
	}

	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("missing from this machine: %s (Debian package names); install them", strings.Join(missing, " "))
	}

	fmt.Fprintf(out, "installing %s\n", strings.Join(missing, " "))

	arguments := append([]string{"install", "--yes", "--no-install-recommends"}, missing...)
	if aptGet(ctx, arguments...) == nil {
		return nil
	}

	// The lists of packages may be missing or old.
	if err := aptGet(ctx, "update"); err != nil {
		return err
	}

	return aptGet(ctx, arguments...)
}

func aptGet(ctx context.Context, arguments ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", arguments...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")

	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(arguments, " "), err, bytes.TrimSpace(out))
	}

	return nil
}

// holds reports whether this process has a capability.
func holds(capability int) bool {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false
	}

	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)

			return err == nil && set&(1<<capability) != 0
		}
	}

	return false
}
