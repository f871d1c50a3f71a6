package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var target = regexp.MustCompile(`(?m)^([a-z0-9-]+):.*## `)

func TestTargets_MatchMakefile(t *testing.T) {
	var want []string
	for _, match := range target.FindAllStringSubmatch(read(t, "Makefile"), -1) {
		want = append(want, match[1])
	}

	assert.ElementsMatch(t, want, names(t, "docs/development.md", "Make targets"))
}

func TestModules_MatchRepository(t *testing.T) {
	var want []string

	err := fs.WalkDir(os.DirFS(root), ".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (path == "_out" || path == ".git"):
			return fs.SkipDir
		case entry.Name() == "go.mod" && path != "go.mod":
			want = append(want, filepath.Dir(path))
		}

		return nil
	})
	require.NoError(t, err)
	assert.ElementsMatch(t, want, names(t, "docs/development.md", "Nested modules"))
}
