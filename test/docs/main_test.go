package docs_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// built is the path of the talos-ccm binary.
var built string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

// run builds talos-ccm once for all tests.
func run(m *testing.M) int {
	folder, err := os.MkdirTemp("", "talos-ccm-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		return 1
	}
	defer os.RemoveAll(folder)

	built = filepath.Join(folder, "talos-ccm")

	if out, err := exec.Command("go", "build", "-o", built, root+"/cmd/talos-ccm").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build talos-ccm: %v\n%s", err, out)

		return 1
	}

	return m.Run()
}
