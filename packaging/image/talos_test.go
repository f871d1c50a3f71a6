package image_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// judge builds the validator with one version of the Talos machinery; see talos/main.go.
func judge(t *testing.T, version string) func(folder, talos string) (output string, err error) {
	t.Helper()

	program := filepath.Join(t.TempDir(), "talos")

	build := exec.CommandContext(t.Context(), "go", "build", "-modfile="+version+".mod", "-o", program, ".")
	build.Dir = "talos"
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")

	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build validator %s: %v\n%s", version, err, output)
	}

	return func(folder, talos string) (string, error) {
		output, err := exec.CommandContext(t.Context(), program, folder, talos).CombinedOutput()

		return string(output), err
	}
}

// layOut writes files as Talos unpacks them.
func layOut(t *testing.T, files []image.File) string {
	t.Helper()

	folder := t.TempDir()
	if err := image.Write(folder, files); err != nil {
		t.Fatal(err)
	}

	return folder
}

// Validate uses one version of the machinery. Every supported version must give the same result.
func TestTalos_EachSupportedVersionAcceptsExtension(t *testing.T) {
	modules, err := filepath.Glob("talos/v*.mod")
	if err != nil {
		t.Fatal(err)
	}

	var judged []string

	for _, module := range modules {
		version := strings.TrimSuffix(filepath.Base(module), ".mod")
		first := strings.TrimPrefix(version, "v") + ".0"
		judged = append(judged, first)

		t.Run(version, func(t *testing.T) {
			judge := judge(t, version)
			files := extensionFiles(t)

			for _, talos := range []string{first, first + "-rc.1", strings.TrimPrefix(version, "v") + ".99"} {
				if output, err := judge(layOut(t, files), talos); err != nil {
					t.Errorf("Talos %s: got error %v: %s", talos, err, output)
				}
			}

			if output, err := judge(layOut(t, files), "1.11.6"); err == nil || !strings.Contains(output, "version constraint") {
				t.Errorf("Talos 1.11.6: got error %v, output %q", err, output)
			}

			broken := appendTo(specPath, "user: 50\n")(t, files)
			if output, err := judge(layOut(t, broken), first); err == nil || !strings.Contains(output, "user") {
				t.Errorf("unknown key: got error %v, output %q", err, output)
			}
		})
	}

	if got, want := strings.Join(judged, " "), strings.Join(image.SupportedTalos, " "); got != want {
		t.Errorf("validators exist for %s, want %s", got, want)
	}
}
