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
	write := func(name, content string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}

	const main = "package main\n\nimport \"example.org/program/library\"\n\nfunc main() { println(library.Now%s) }\n"

	write("go.mod", "module example.org/program\n")
	write("library/library.go", fmt.Sprintf("package library\n\nconst Now = %d\n", time.Now().UnixNano())) // not in the build cache

	build := func(more string) (string, error) {
		write("main.go", fmt.Sprintf(main, more))

		var out bytes.Buffer

		cmd := exec.Command("go", "build", "-o="+filepath.Join(dir, "program"), ".")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOWORK=off")

		err := builder.Packages(&out, "Building a program", cmd)

		return out.String(), err
	}

	out, err := build(", library.Then")
	assert.ErrorContains(t, err, "main.go:5:44: undefined: library.Then")
	assert.Regexp(t, `^Building a program\n(?:Building a program, .*\n)*Building a program, 2 of at most 2 packages compiled, \d+ s\n$`, out)

	out, err = build("")
	require.NoError(t, err)
	assert.FileExists(t, filepath.Join(dir, "program"))
	assert.Regexp(t, `, 1 of at most 1 packages compiled, \d+ s\n$`, out)
}
