package docs

import (
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
)

// programs are the programs that pages use.
var programs = strings.Fields("cosign crane curl docker echo gh go grep helm jq kubectl make mkdir sha256sum talosctl tar")

// shell expands variables to their names, and commands to a dollar sign.
var shell = &expand.Config{
	Env: expand.FuncEnviron(func(name string) string { return strings.TrimSuffix("$"+name, "$IFS") }),
	CmdSubst: func(w io.Writer, _ *syntax.CmdSubst) error {
		_, err := io.WriteString(w, "$")

		return err
	},
}

// script checks the commands of a block, or of text, which has no language and whose files need not exist.
func (c *Checker) script(p *page, script block) {
	file, err := syntax.NewParser().Parse(strings.NewReader(script.text), "")
	if err != nil {
		c.report(p, script.line, err)

		return
	}

	syntax.Walk(file, func(node syntax.Node) bool {
		words, err := c.words(node)
		if err == nil && script.language != "" {
			err = c.files(p, words)
		}

		if err != nil {
			c.report(p, script.line+int(node.Pos().Line())-1, err)
		}

		return true
	})
}

// words checks a command or redirection, and returns the words that may name its input.
func (c *Checker) words(node syntax.Node) ([]string, error) {
	switch n := node.(type) {
	case *syntax.CallExpr:
		words, err := expand.Fields(shell, n.Args...)
		if err == nil && len(words) > 0 {
			err = c.command(path.Base(words[0]), words[1:])
		}

		return words, err
	case *syntax.Redirect:
		if n.Hdoc != nil {
			text, err := expand.Document(shell, n.Hdoc)

			return nil, errors.Join(err, c.documents(text))
		}

		if n.Op == syntax.RdrIn {
			return expand.Fields(shell, n.Word)
		}
	}

	return nil, nil
}

// command checks a command: the arguments of make, talos-ccm and patches, and the name of others.
func (c *Checker) command(name string, args []string) error {
	c.Commands++

	switch {
	case name == "make":
		return c.make(args)
	case name == "talos-ccm", strings.HasPrefix(name, "talos-ccm-linux-"):
		return c.usage(args)
	case !slices.Contains(programs, name):
		return fmt.Errorf("unknown command %s", name)
	case name == "talosctl":
		for _, arg := range args {
			if strings.HasPrefix(arg, "{") {
				return c.machineConfig([]byte(arg))
			}
		}
	}

	return nil
}

var subcommand = regexp.MustCompile(`^(?:[a-z]+(?: |$))*`)

// usage asks talos-ccm for the help of a command, for which it parses all flags.
func (c *Checker) usage(args []string) error {
	line := "talos-ccm " + strings.Join(args, " ")
	name := "talos-ccm " + subcommand.FindString(strings.Join(args, " "))

	switch help, err := exec.Command(c.Binary, append(args, "--help")...).CombinedOutput(); {
	case err != nil:
		return fmt.Errorf("%s: %s", line, strings.TrimSpace(string(help)))
	case !strings.Contains(string(help), strings.TrimSpace(name)):
		return fmt.Errorf("unknown command %s", name)
	default:
		return nil
	}
}

// make checks that the Makefile has the targets and variables in args.
func (c *Checker) make(args []string) error {
	for _, arg := range args {
		name, _, assigns := strings.Cut(arg, "=")

		switch {
		case assigns && !strings.Contains(c.makefile, "$("+name+")") && !strings.Contains(c.makefile, "\n"+name+" ?="):
			return fmt.Errorf("the Makefile has no variable %s", name)
		case !assigns && !strings.Contains(c.makefile, "\n"+name+":"):
			return fmt.Errorf("the Makefile has no target %s", name)
		}
	}

	return nil
}

// inputFile matches words that name a file for a command.
var inputFile = regexp.MustCompile(`^(?:--?[a-z-]+=)?@?([\w./-]+\.ya?ml)$`)

// files checks that input files of a command exist in the repository, or are created by the page or by make.
func (c *Checker) files(p *page, words []string) error {
	for _, word := range words {
		match := inputFile.FindStringSubmatch(word)
		if match == nil || words[0] == "tar" || strings.HasPrefix(match[1], "_out/") || c.exists(match[1]) == nil {
			continue
		}

		// A block with the file's name in its first line, an ExtensionServiceConfig, or output of a command.
		made := regexp.MustCompile(`(?:^# |(?m:mountPath: .*/)|> |(?:-o|--output) )` + regexp.QuoteMeta(match[1]) + `\b`)
		if !slices.ContainsFunc(p.blocks, func(b block) bool { return made.MatchString(b.text) }) {
			return fmt.Errorf("file %s exists neither in the repository nor on the page (a block whose first line is # %[1]s creates it)", match[1])
		}
	}

	return nil
}
