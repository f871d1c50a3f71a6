package config_test

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

// FuzzParse: whatever the bytes, there is an answer, and the answer is one of two.
func FuzzParse(f *testing.F) {
	for _, file := range goodFiles() {
		f.Add(file.file)
	}

	for _, file := range badFiles() {
		f.Add(file.file)
	}

	f.Fuzz(func(t *testing.T, file string) {
		compiled, err := config.Parse("config.yaml", []byte(file))

		var mistakes *config.Error

		switch {
		case err == nil && compiled != nil && compiled.Rules != nil:
		case errors.As(err, &mistakes) && compiled == nil && len(mistakes.Problems) > 0:
			sensible(t, mistakes.Problems, file)
		default:
			t.Fatalf("got %v and %v", compiled, err)
		}
	})
}

// sensible asserts that the problems are in the file and have a line each.
func sensible(t *testing.T, problems []config.Problem, file string) {
	t.Helper()

	// What YAML 1.1 breaks lines at, and one more: text may end before the file does.
	lines := len(lineBreak.FindAllString(file, -1)) + 2

	for _, p := range problems {
		if p.Line > lines || p.Msg == "" || strings.Contains(p.String(), "\n") {
			t.Errorf("got %+v in a file of %d lines", p, lines)
		}
	}
}

var lineBreak = regexp.MustCompile("[\n\r\u0085\u2028\u2029]")
