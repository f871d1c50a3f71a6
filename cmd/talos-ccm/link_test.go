package main

import (
	"bufio"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A function that looks up methods by names that are not constant, as text/template does, makes the linker keep all exported
// methods of all types. The program would be half as large again.
func TestProgram_LooksUpNoMethodByName(t *testing.T) {
	build := exec.CommandContext(t.Context(), "go", "build", "-tags=grpcnotrace", "-ldflags=-dumpdep", "-o", os.DevNull, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")

	output, err := build.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, build.Start())

	var (
		lookup   string                // the first function that looks up methods; others may be linked because of it
		parents  = map[string]string{} // the first symbol that refers to a symbol
		messages []string              // other lines, which the compiler prints
		lines    = bufio.NewScanner(output)
	)

	for lines.Buffer(nil, 1<<20); lines.Scan(); {
		from, to, isEdge := strings.Cut(lines.Text(), " -> ")
		if !isEdge {
			messages = append(messages, lines.Text())

			continue
		}

		if lookup == "" && strings.HasSuffix(to, "<ReflectMethod>") {
			lookup = symbol(to)
		}

		if _, known := parents[symbol(to)]; !known {
			parents[symbol(to)] = symbol(from)
		}
	}

	require.NoError(t, lines.Err())
	require.NoError(t, build.Wait(), messages)
	require.NotEmpty(t, parents["main.main"], "the linker printed no dependencies")

	var path []string
	for name := lookup; parents[name] != ""; name = parents[name] {
		path = append(path, name)
	}

	slices.Reverse(path)
	assert.Empty(t, strings.Join(path, "\n-> "), "methods are looked up by name; path from main")
}

// symbol removes the attributes that the linker prints after a name.
func symbol(text string) string {
	return strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(text, "<ReflectMethod>"), "<UsedInIface>"), " ")
}
