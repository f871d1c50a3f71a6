// Package docs checks the project's documentation: links and anchors exist, and code is valid for its language. It
// loads machine configuration with Talos's loader, objects with Kubernetes' types and configuration files with package
// config, and parses commands with a shell parser. talos-ccm checks its own flags, variables and subcommands. The
// arguments of other programs are not checked. It makes no network requests and changes no files. Pages contain no
// HTML.
package docs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

// Checker checks the documentation of a repository.
type Checker struct {
	// Root is the directory of the repository, and Binary the path of talos-ccm.
	Root, Binary string
	// Problems have their positions, as compilers print them.
	Problems []string
	// Commands counts the commands that were checked.
	Commands int

	anchors map[string]anchors // by page
	source  []byte             // of the page that is being checked
}

// Pages returns the Markdown files of the repository in root by name: those in root itself and of the chart, and all
// below docs and packaging/catalog.
func Pages(root string) (map[string][]byte, error) {
	pages := map[string][]byte{}

	return pages, fs.WalkDir(os.DirFS(root), ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err == nil && entry.IsDir() && !slices.Contains([]string{".", "packaging", "packaging/chart"}, name) &&
			!strings.HasPrefix(name+"/", "docs/") && !strings.HasPrefix(name+"/", "packaging/catalog/"):
			return fs.SkipDir
		case err == nil && path.Ext(name) == ".md":
			pages[name], err = os.ReadFile(filepath.Join(root, name))
		}

		return err
	})
}

// Check checks all pages.
func (c *Checker) Check() error {
	pages, err := Pages(c.Root)
	if err != nil {
		return err
	}

	roots := map[string]ast.Node{}
	c.anchors = map[string]anchors{}

	for name, source := range pages {
		c.anchors[name] = anchors{}
		markdown := goldmark.New(goldmark.WithExtensions(extension.GFM), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
		roots[name] = markdown.Parser().Parse(text.NewReader(source), parser.WithContext(parser.NewContext(parser.WithIDs(c.anchors[name]))))
	}

	for _, name := range slices.Sorted(maps.Keys(roots)) {
		c.source = pages[name]
		err = errors.Join(err, ast.Walk(roots[name], func(node ast.Node, entering bool) (ast.WalkStatus, error) {
			if entering {
				c.check(position{name, bytes.Count(c.source[:max(node.Pos(), 0)], []byte("\n")) + 1}, node)
			}

			return ast.WalkContinue, nil
		}))
	}

	return err
}

// position is a line of a page.
type position struct {
	page string
	line int
}

func (c *Checker) report(at position, err error) {
	if err != nil {
		c.Problems = append(c.Problems, fmt.Sprintf("%s:%d: %v", at.page, at.line, err))
	}
}

// check checks a link or code.
func (c *Checker) check(at position, node ast.Node) {
	switch n := node.(type) {
	case *ast.Link:
		c.report(at, c.link(at.page, string(n.Destination)))
	case *ast.Image:
		c.report(at, c.link(at.page, string(n.Destination)))
	case *ast.CodeSpan:
		span, _, _ := strings.Cut(string(c.source[n.FirstChild().Pos():]), "`")
		c.report(at, c.span(at, strings.Join(strings.Fields(span), " ")))
	case *ast.FencedCodeBlock:
		fence, _, _ := strings.Cut(string(c.source[n.Pos():]), "\n")
		at.line++
		c.report(at, c.block(at, strings.Trim(fence, "` "), string(n.Lines().Value(c.source))))
	case *ast.CodeBlock:
		c.report(at, c.block(at, "", ""))
	}
}

// link checks that a link points to an existing file and anchor of the repository. Links to other hosts are not
// checked.
func (c *Checker) link(page, link string) error {
	target, err := url.Parse(link)
	if err != nil || target.IsAbs() {
		return err
	}

	name := page

	switch {
	case path.IsAbs(target.Path):
		return fmt.Errorf("link %s is absolute, not relative to the page", link)
	case target.Path != "":
		name = path.Join(path.Dir(page), target.Path)
	}

	if _, err := fs.Stat(os.DirFS(c.Root), name); err != nil || target.Fragment == "" || c.anchors[name][target.Fragment] {
		return err
	}

	return fmt.Errorf("link %s: %s has no heading for #%s", link, name, target.Fragment)
}

// anchors are the anchors of a page. Headings get them as on GitHub: lower case, hyphens for spaces, no punctuation or
// symbols, and duplicates a number.
type anchors map[string]bool

var punctuation = regexp.MustCompile(`[^\p{L}\p{M}\p{N} _-]`)

// Generate returns the anchor of a heading.
func (a anchors) Generate(heading []byte, _ ast.NodeKind) []byte {
	name := punctuation.ReplaceAllString(strings.ToLower(string(heading)), "")
	name = strings.ReplaceAll(strings.TrimSpace(name), " ", "-")

	unique := name
	for i := 1; a[unique]; i++ {
		unique = fmt.Sprintf("%s-%d", name, i)
	}

	a[unique] = true

	return []byte(unique)
}

// Put adds an anchor.
func (a anchors) Put(anchor []byte) { a[string(anchor)] = true }

var (
	sourcePath = regexp.MustCompile(`^(?:\.ci|cmd|docs|extension|packaging|pkg|test)/[\w./-]+$`)
	variable   = regexp.MustCompile(`^TALOS_CCM_[A-Z0-9_]+=`)
	assignment = regexp.MustCompile(`^--[a-z0-9-]+=\S+$`)
	ourCommand = regexp.MustCompile(`^(?:kubectl|make|talos-ccm|talosctl) [a-z-]`)
)

// span checks code within text: a path, a command, or a value of a variable or flag. TestNames_Exist checks names.
func (c *Checker) span(at position, text string) (err error) {
	switch {
	case ourCommand.MatchString(text):
		c.script(at, text)
	case variable.MatchString(text):
		err = c.accepts([]string{text})
	case assignment.MatchString(text):
		if err = c.accepts(nil, text); err != nil && strings.Contains(err.Error(), "unknown flag") {
			err = nil // of another program
		}
	}

	return errors.Join(err, c.path(text))
}

// path checks that a path of the repository exists.
func (c *Checker) path(text string) (err error) {
	if sourcePath.MatchString(text) {
		_, err = fs.Stat(os.DirFS(c.Root), text)
	}

	return err
}

// block checks a block with the words info after its fence.
func (c *Checker) block(at position, info, text string) error {
	switch info {
	case "sh":
		c.script(at, text)
		c.inputs(at, text)
	case "yaml", "yaml document":
		return c.documents(text)
	case "console", "text":
	case "yaml config", "yaml machine", "yaml node", "yaml wrong", "text mistakes": // for the tests of package config
	case "":
		return errors.New("a block without a language: write one after the fence, text or console for output")
	default:
		return fmt.Errorf("unknown language %s", info)
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
