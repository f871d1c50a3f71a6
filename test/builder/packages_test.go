package builder_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/builder"
)

func TestPackages_ReportsProgressAndErrors(t *testing.T) {
	dir := t.TempDir()

	for name, content := range map[string]string{
		"go.mod": "module example.org/program\n",
		// It is not in the build cache.
		"library/library.go": fmt.Sprintf("package library\n\nconst Now = %d\n", time.Now().UnixNano()),
		"main.go":            "package main\n\nimport \"example.org/program/library\"\n\nfunc main() { println(library.Now, library.Then) }\n",
	} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}

	build := func() (string, error) {
		var out bytes.Buffer

		cmd := exec.Command("go", "build", "-o="+filepath.Join(dir, "program"), ".")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOWORK=off")

		err := builder.Packages(&out, "Building a program", cmd)

		return out.String(), err
	}

	out, err := build()
	assert.ErrorContains(t, err, "main.go:5:44: undefined: library.Then")
	assert.Regexp(t, `^Building a program\nBuilding a program, 2 of at most 2 packages compiled, \d+ s\n$`, out)

	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte("package main\n\nfunc main() {}\n"), 0o600))

	out, err = build()
	require.NoError(t, err)
	assert.FileExists(t, filepath.Join(dir, "program"))
	assert.Regexp(t, `, 1 of at most 1 packages compiled, \d+ s\n$`, out)
}
