package docs

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// makefile has the targets and variables of the Makefile.
type makefile struct{ targets, variables map[string]bool }

var (
	targetLine = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	variables  = regexp.MustCompile(`\$\(([A-Z][A-Z0-9_]*)\)|(?m)^([A-Z][A-Z0-9_]*) \?=`)
)

func readMakefile(file string) (makefile, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return makefile{}, fmt.Errorf("read Makefile: %w", err)
	}

	m := makefile{targets: map[string]bool{}, variables: map[string]bool{}}

	for _, match := range targetLine.FindAllSubmatch(text, -1) {
		m.targets[string(match[1])] = true
	}

	for _, match := range variables.FindAllSubmatch(text, -1) {
		m.variables[string(match[1])+string(match[2])] = true
	}

	return m, nil
}

// check returns an error if the Makefile does not have a target or variable in args.
func (m makefile) check(args []string) error {
	for _, arg := range args {
		name, _, assigns := strings.Cut(arg, "=")

		switch {
		case assigns && !m.variables[name]:
			return fmt.Errorf("the Makefile has no variable %s", name)
		case assigns, arg == "--silent":
		case !m.targets[arg]:
			return fmt.Errorf("the Makefile has no target %s", arg)
		}
	}

	return nil
}
