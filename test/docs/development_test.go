package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

var target = regexp.MustCompile(`(?m)^([a-z0-9-]+):.*## `)

func TestTargets_MatchMakefile(t *testing.T) {
	var got, want []string
	for _, cells := range rows(t, "docs/development.md", "Make targets") {
		got = append(got, codes(cells[0])...)
	}

	for _, match := range target.FindAllStringSubmatch(read(t, "Makefile"), -1) {
		want = append(want, match[1])
	}

	same(t, "targets", got, want)
}

func TestModules_MatchRepository(t *testing.T) {
	var got, want []string
	for _, cells := range rows(t, "docs/development.md", "Nested modules") {
		got = append(got, codes(cells[0])...)
	}

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
	if err != nil {
		t.Fatal(err)
	}

	same(t, "modules", got, want)
}
