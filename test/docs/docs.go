// Package docs checks the project's documentation: links and anchors exist, and blocks are valid for their language.
// Talos's loader reads machine configuration, Kubernetes' types objects, package config configuration files, and a
// shell parser commands. talos-ccm checks its own flags, variables and subcommands. The arguments of other programs are
// not checked, except for names of files. It makes no network requests and changes no files.
package docs

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Checker checks the documentation of a repository.
type Checker struct {
	// Root is the directory of the repository, and Binary the path of talos-ccm.
	Root, Binary string
	// Problems have their positions, as compilers print them.
	Problems []string
	// Links, Blocks and Commands count what was checked.
	Links, Blocks, Commands int

	makefile string
	pages    map[string]*page
}

// Pages returns the Markdown files of the repository in root: those in root itself, and all below docs.
func Pages(root string) ([]string, error) {
	pages, err := fs.Glob(os.DirFS(root), "*.md")
	if err != nil {
		return nil, fmt.Errorf("list pages: %w", err)
	}

	err = fs.WalkDir(os.DirFS(root), "docs", func(name string, _ fs.DirEntry, err error) error {
		if path.Ext(name) == ".md" {
			pages = append(pages, name)
		}

		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list pages: %w", err)
	}

	return pages, nil
}

// Check checks all pages.
func (c *Checker) Check() error {
	names, err := Pages(c.Root)
	if err != nil {
		return err
	}

	makefile, err := os.ReadFile(filepath.Join(c.Root, "Makefile"))
	if err != nil {
		return fmt.Errorf("read Makefile: %w", err)
	}

	c.makefile, c.pages = "\n"+string(makefile), map[string]*page{}

	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(c.Root, name))
		if err != nil {
			return fmt.Errorf("read page: %w", err)
		}

		c.pages[name] = parse(name, text)
	}

	for _, name := range names {
		c.check(c.pages[name])
	}

	return nil
}

func (c *Checker) check(p *page) {
	for _, link := range p.links {
		c.Links++

		if err := c.link(p, link.text); err != nil {
			c.report(p, link.line, fmt.Errorf("link %s: %w", link.text, err))
		}
	}

	for _, span := range p.spans {
		if ourCommand.MatchString(span.text) {
			c.script(p, block{located: span})
		} else if err := c.span(span.text); err != nil {
			c.report(p, span.line, err)
		}
	}

	for _, b := range p.blocks {
		c.Blocks++

		if b.language == "sh" {
			c.script(p, b)
		} else if err := c.block(b); err != nil {
			c.report(p, b.line, err)
		}
	}
}

func (c *Checker) report(p *page, line int, err error) {
	c.Problems = append(c.Problems, fmt.Sprintf("%s:%d: %v", p.name, line, err))
}

// exists returns an error if the repository does not have a file or directory.
func (c *Checker) exists(name string) error {
	if _, err := os.Stat(filepath.Join(c.Root, name)); err != nil {
		return fmt.Errorf("%s does not exist", name)
	}

	return nil
}

// link checks that a link points to an existing file and anchor of the repository. Links to other hosts are not checked.
func (c *Checker) link(from *page, link string) error {
	target, err := url.Parse(link)
	if err != nil || target.IsAbs() {
		return err
	}

	name := from.name
	if target.Path != "" {
		name = path.Join(path.Dir(name), target.Path)
	}

	switch {
	case path.IsAbs(target.Path):
		return errors.New("it is absolute, not relative to the page")
	case !filepath.IsLocal(name):
		return errors.New("it points outside of the repository")
	case c.exists(name) != nil, target.Fragment == "":
		return c.exists(name)
	case c.pages[name] == nil:
		return errors.New("only pages have anchors")
	case !c.pages[name].anchors[target.Fragment]:
		return fmt.Errorf("%s has no heading for #%s", name, target.Fragment)
	default:
		return nil
	}
}

var (
	sourcePath = regexp.MustCompile(`^(?:\.ci|cmd|docs|extension|packaging|pkg|test)/[\w./-]+$`)
	variable   = regexp.MustCompile(`^TALOS_CCM_[A-Z0-9_]+(=|$)`)
	assignment = regexp.MustCompile(`^--[a-z0-9-]+=\S+$`)
	ourCommand = regexp.MustCompile(`^(?:kubectl|make|talos-ccm|talosctl) [a-z-]`)
	// others are variables of the Makefile and of tests.
	others = []string{"TALOS_CCM_CACHE", "TALOS_CCM_LOGS"}
)

// span checks code within text that names a path, variable or flag of this project.
func (c *Checker) span(text string) (err error) {
	has := func(message string) bool { return err != nil && strings.Contains(err.Error(), message) }

	switch {
	case sourcePath.MatchString(text):
		return c.exists(text)
	case slices.Contains(others, text):
		return nil
	case variable.MatchString(text):
		// Without a value, only the name is checked.
		if err = c.accepts([]string{text}); strings.Contains(text, "=") || has("no such flag") {
			return err
		}
	case assignment.MatchString(text):
		// TestNames_Exist knows the flags of other programs.
		if err = c.accepts(nil, text); !has("unknown flag") {
			return err
		}
	}

	return nil
}

// accepts returns an error if talos-ccm rejects environ or args. Without a kubeconfig it exits after it has validated
// its flags.
func (c *Checker) accepts(environ []string, args ...string) error {
	const nowhere = "/nonexistent/kubeconfig"

	cmd := exec.Command(c.Binary, append(slices.Clone(args), "--talosconfig="+nowhere, "--kubeconfig="+nowhere)...)
	cmd.Env = append(slices.Clone(environ), "PATH=")

	out, err := cmd.CombinedOutput()
	if err == nil || strings.Contains(string(out), "read kubeconfig: stat "+nowhere) {
		return nil
	}

	return errors.New(strings.TrimSpace(string(out)))
}

// block checks a block other than commands.
func (c *Checker) block(b block) error {
	switch {
	case strings.TrimSpace(b.text) == "":
		return errors.New("an empty block")
	case b.language == "":
		return errors.New("a block without a language: write one after the fence, text or console for output")
	case b.language == "yaml":
		return c.yaml(b)
	case b.language != "console" && b.language != "text":
		return fmt.Errorf("unknown language %s", b.language)
	default:
		return nil
	}
}
