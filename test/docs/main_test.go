package docs_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/talos-ccm/talos-ccm/test/builder"
)

// built is the path of the talos-ccm binary.
var built string

// TestMain builds talos-ccm once for all tests.
func TestMain(m *testing.M) {
	directory, err := os.MkdirTemp("", "talos-ccm-")
	if err != nil {
		panic(err)
	}

	built = filepath.Join(directory, "talos-ccm")

	if err := builder.Executable(root+"/cmd/talos-ccm", built); err != nil {
		panic(err)
	}

	code := m.Run()
	_ = os.RemoveAll(directory)

	os.Exit(code)
}
