package release_test

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	"mvdan.cc/sh/v3/syntax"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// recipe has the keys of pkg.yaml that are used here (siderolabs/bldr v0.6.3, internal/pkg/types/v1alpha2). bldr
// ignores unknown keys.
type recipe struct {
	Name          string
	Variant       string
	Shell         string
	BuildPlatform string `yaml:"buildPlatform"`
	Dependencies  []struct{ Image, Stage string }
	Steps         []step
	Finalize      []struct{ From, To string }
}

type step struct {
	Env        map[string]string
	Network    string
	CachePaths []string `yaml:"cachePaths"`
	Sources    []struct{ URL, Destination, SHA256, SHA512 string }
	Prepare    []string
	Build      []string
	Install    []string
	Test       []string
	SBOM       struct {
		OutputPath    string `yaml:"outputPath"`
		Version, PURL string
		CPEs          []string
		Licenses      []string
	}
}

// scripts returns all shell scripts.
func (r recipe) scripts() []string {
	var all []string
	for _, s := range r.Steps {
		all = slices.Concat(all, s.Prepare, s.Build, s.Install, s.Test)
	}

	return all
}

// functions are the template functions that our recipes use. bldr supports all of Masterminds/sprig.
var functions = template.FuncMap{
	"default": func(fallback string, given any) any {
		if truth, _ := template.IsTrue(given); truth {
			return given
		}

		return fallback
	},
	"ternary": func(yes, no string, condition bool) string {
		if condition {
			return yes
		}

		return no
	},
}

// render executes a template as bldr does.
func render(t *testing.T, content []byte, variables map[string]string) []byte {
	t.Helper()

	parsed, err := template.New("").Funcs(functions).Parse(string(content))
	require.NoError(t, err)

	var out bytes.Buffer
	require.NoError(t, parsed.Execute(&out, variables))

	return out.Bytes()
}

// decode decodes YAML and refuses unknown keys.
func decode(t *testing.T, content []byte, into any) {
	t.Helper()
	require.NoError(t, yaml.Load(content, into, yaml.WithKnownFields()), string(content))
}

// platform returns the variables that bldr sets.
func platform(architecture string) map[string]string { return map[string]string{"ARCH": architecture} }

// withVariables adds the variables of a file to the variables of the parent directories.
func withVariables(t *testing.T, path string, above map[string]string) map[string]string {
	t.Helper()

	all := maps.Clone(above)
	decode(t, render(t, read(t, path), above), &all)

	return all
}

func loadRecipe(t *testing.T, path string, variables map[string]string) recipe {
	t.Helper()

	var r recipe
	decode(t, render(t, read(t, path), variables), &r)

	return r
}

func ours(t *testing.T, architecture string) recipe {
	t.Helper()

	return loadRecipe(t, "pkg.yaml", withVariables(t, "vars.yaml", platform(architecture)))
}

// proposed returns the recipe of the catalog entry.
func proposed(t *testing.T) recipe {
	t.Helper()

	return loadRecipe(t, entry+"/pkg.yaml.draft", proposedVariables(t))
}

func TestBldr_ScriptsHaveValidSyntax(t *testing.T) {
	for _, script := range slices.Concat(ours(t, "x86_64").scripts(), proposed(t).scripts()) {
		_, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(script), "")
		assert.NoError(t, err, script)
	}
}

func TestBldr_CrossCompiles(t *testing.T) {
	for architecture, want := range map[string]string{"x86_64": "amd64", "aarch64": "arm64"} {
		r := ours(t, architecture)
		assert.Equal(t, want, r.Steps[0].Env["GOARCH"])
		assert.Equal(t, "linux/amd64", r.BuildPlatform)
	}

	variables := withVariables(t, "vars.yaml", map[string]string{"ARCH": "x86_64", "BUILD_ARG_BUILDARCH": "arm64"})
	assert.Equal(t, "linux/arm64", loadRecipe(t, "pkg.yaml", variables).BuildPlatform)
}

// goBuild returns the arguments of go build that affect the binary.
func goBuild(t *testing.T, script string) []string {
	t.Helper()

	file, err := syntax.NewParser().Parse(strings.NewReader(script), "")
	require.NoError(t, err)

	var found []string

	syntax.Walk(file, func(node syntax.Node) bool {
		if call, isCall := node.(*syntax.CallExpr); isCall {
			if words := texts(call.Args); len(words) > 2 && words[0] == "go" && words[1] == "build" {
				found = words[2:]
			}
		}

		return true
	})

	// The source and output paths may differ.
	for _, flag := range []string{"-C", "-o"} {
		if i := slices.Index(found, flag); i >= 0 {
			found = slices.Delete(found, i, i+2)
		}
	}

	return found
}

// texts returns words without quotes.
func texts(words []*syntax.Word) []string {
	all := make([]string, len(words))

	for i, word := range words {
		for _, part := range word.Parts {
			switch p := part.(type) {
			case *syntax.Lit:
				all[i] += p.Value
			case *syntax.SglQuoted:
				all[i] += p.Value
			}
		}
	}

	return all
}

// makefileVariable returns the unexpanded value of a variable.
func makefileVariable(t *testing.T, name string) string {
	t.Helper()

	match := regexp.MustCompile(`(?m)^` + name + ` \??:?= (.*)$`).FindSubmatch(read(t, "Makefile"))
	require.NotNil(t, match, "Makefile has no variable %s", name)

	return string(match[1])
}

func TestBldr_BuildsLikeMakefile(t *testing.T) {
	version := withVariables(t, "vars.yaml", platform("x86_64"))["VERSION"]

	command := strings.NewReplacer("$(LDFLAGS)", makefileVariable(t, "LDFLAGS"), "$(GO)", "go", "$(TAG)", "v"+version, "$@", "FILE").
		Replace(makefileVariable(t, "go_build"))
	command = strings.ReplaceAll(command, "$(TAG)", "v"+version)
	want := goBuild(t, command)

	for name, r := range map[string]recipe{"pkg.yaml": ours(t, "x86_64"), "catalog entry": proposed(t)} {
		for _, s := range r.Steps {
			if len(s.Build) > 0 {
				assert.Equal(t, want, goBuild(t, s.Build[0]), name)
			}
		}

		assert.Equal(t, "0", r.Steps[0].Env["CGO_ENABLED"], name)
	}
}

var installs = regexp.MustCompile(`(?m)^install -D -m (\d+) \S+ /(\S+)$`)

// installed returns the modes of the files in the image by path.
func installed(r recipe) map[string]string {
	files := map[string]string{"manifest.yaml": "0644"}

	for _, s := range r.Steps {
		for _, script := range s.Install {
			for _, match := range installs.FindAllStringSubmatch(script, -1) {
				files[match[2]] = match[1]
			}
		}

		if path := s.SBOM.OutputPath; path != "" {
			files[strings.TrimPrefix(path, "/")] = "0644"
		}
	}

	return files
}

func TestBldr_InstallsSameFilesAsMakeImage(t *testing.T) {
	files, err := image.Extension(image.Release{Version: "v1.2.3", Manifest: read(t, "manifest.yaml")}, nil)
	require.NoError(t, err)

	want := map[string]string{}
	for _, file := range files {
		want[file.Path] = fmt.Sprintf("%04o", file.Mode)
	}

	assert.Equal(t, want, installed(ours(t, "x86_64")))
}

func TestBldr_SBOMHasManifestVersion(t *testing.T) {
	for _, r := range []recipe{ours(t, "x86_64"), proposed(t)} {
		var manifest struct{ Metadata struct{ Version string } }
		require.NoError(t, yaml.Unmarshal(read(t, "manifest.yaml"), &manifest))

		version := manifest.Metadata.Version
		bill := r.Steps[len(r.Steps)-1].SBOM
		assert.Equal(t, version, bill.Version)
		assert.Equal(t, "pkg:golang/github.com/talos-ccm/talos-ccm@v"+version, bill.PURL)
	}
}
