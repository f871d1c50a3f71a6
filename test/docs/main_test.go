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

// TestMain builds talos-ccm once for all tests.
func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "talos-ccm-")
	if err != nil {
		panic(err)
	}

	built = filepath.Join(folder, "talos-ccm")

	if out, err := exec.Command("go", "build", "-o", built, root+"/cmd/talos-ccm").CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build talos-ccm: %v\n%s", err, out))
	}

	code := m.Run()
	_ = os.RemoveAll(folder)

	os.Exit(code)
}
