package config_test

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

// FuzzParse asserts that Parse returns either a configuration or problems that are in the file.
func FuzzParse(f *testing.F) {
	for _, file := range goodFiles() {
		f.Add(file.file)
	}

	for _, file := range badFiles() {
		f.Add(file.file)
	}

	f.Fuzz(func(t *testing.T, file string) {
		compiled, err := config.Parse("config.yaml", []byte(file))

		problems, failed := errors.AsType[*config.Error](err)

		switch {
		case err == nil && compiled != nil && compiled.Rules != nil:
		case failed && compiled == nil && len(problems.Problems) > 0:
			assertReadable(t, problems.Problems, file)
		default:
			t.Fatalf("got %v and %v", compiled, err)
		}
	})
}

// assertReadable asserts that the problems are within the file and have one line each.
func assertReadable(t *testing.T, problems []config.Problem, file string) {
	t.Helper()

	// A problem may be one line after the last line of the file.
	lines := len(lineBreak.FindAllString(file, -1)) + 2

	for _, p := range problems {
		assert.LessOrEqual(t, p.Line, lines)
		assert.NotEmpty(t, p.Msg)
		assert.NotContains(t, p.String(), "\n")
	}
}

var lineBreak = regexp.MustCompile("[\n\r\u0085\u2028\u2029]")

// FuzzParseFile asserts that ParseFile returns either a configuration or problems.
func FuzzParseFile(f *testing.F) {
	for _, file := range goodFiles() {
		f.Add([]byte(file.file))
	}

	f.Add([]byte("apiVersion: v1alpha1\nkind: ExtensionServiceConfig\nname: a\nenvironment: [A=b, c]\nconfigFiles: [{mountPath: /b, content: \"global: {}\"}]\n"))
	f.Add([]byte("kind: ExtensionServiceConfig\nname: a\nconfigFiles:\n- mountPath: /b\n  content: |\n\n    global: {a: b}\n---\nkind: ConfigMap\ndata:\n  a.yaml: >\n    b: c\n"))
	f.Add([]byte("image: a\nenabledControllers: [route, a]\nextraArgs: [--b=c, -d]\n"))

	f.Fuzz(func(t *testing.T, data []byte) {
		extension := config.Extension{
			Name: "a", MountPath: "/b",
			Warn: func(variables []string) []string { return variables },
			Unused: func(variables []string) map[string]string {
				return map[string]string{"global": strings.Join(variables, ", ")}
			},
			CheckEnvironment: func(variables []string) error {
				if slices.Contains(variables, "c") {
					return errors.New("no c")
				}

				return nil
			},
		}

		compiled, err := config.ParseFile("config.yaml", data, extension)
		require.Equal(t, err == nil, compiled != nil, err)
	})
}
