// Package docs checks the project's documentation: links and anchors exist, and each block is valid for its language. Machine configuration is read by Talos's
// loader, objects by Kubernetes' types, configuration files by package config, and commands by a shell parser and against the flags of their programs. Commands
// of talos-ccm that need no cluster are run. It makes no network requests and changes no files.
package docs

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Checker checks the documentation of a repository.
type Checker struct {
	// Root is the directory of the repository.
	Root string
	// Binary is the path of talos-ccm.
	Binary string
	// Given maps names of files that a page may use without creating them, such as output of talosctl, to paths in the repository.
	Given map[string]string

	makefile makefile
	product  product
	pages    map[string]*page
}

// Problem is an error in a page.
type Problem struct {
	Page string
	Line int
	Text string
}

// String returns the problem with its position, as compilers print it.
func (p Problem) String() string { return fmt.Sprintf("%s:%d: %s", p.Page, p.Line, p.Text) }

// Report is the result of a check.
type Report struct {
	Pages, Links int
	// Snippets counts the blocks that were checked, and Output the blocks of program output, which are not.
	Snippets, Output int
	// Run, Parsed and Named count commands: those of talos-ccm that were run, those whose arguments were checked, and those of which only the name was.
	Run, Parsed, Named int
	Problems           []Problem
}

// String returns the report in one line.
func (r Report) String() string {
	return fmt.Sprintf("%d pages: %d links, %d snippets, %d output blocks; commands: %d run, %d parsed, %d known by name; %d problems",
		r.Pages, r.Links, r.Snippets, r.Output, r.Run, r.Parsed, r.Named, len(r.Problems))
}

// Pages returns the Markdown files of the repository in root: those in root itself, and all below docs.
func Pages(root string) ([]string, error) {
	var pages []string

	for _, folder := range []string{".", "docs"} {
		err := fs.WalkDir(os.DirFS(root), folder, func(name string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && folder == "." && name != ".":
				return fs.SkipDir
			case path.Ext(name) == ".md":
				pages = append(pages, name)
			}

			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("list pages in %s: %w", folder, err)
		}
	}

	return pages, nil
}

// Check checks pages. Their paths are relative to the root.
func (c *Checker) Check(ctx context.Context, pages ...string) (Report, error) {
	var err error
	if c.makefile, err = readMakefile(filepath.Join(c.Root, "Makefile")); err != nil {
		return Report{}, err
	}

	if c.product, err = askProduct(ctx, c.Binary); err != nil {
		return Report{}, err
	}

	c.pages = map[string]*page{}
	report := Report{Pages: len(pages)}

	for _, name := range pages {
		p, err := c.page(name)
		if err != nil {
			return Report{}, err
		}

		if err := c.check(ctx, p, &report); err != nil {
			return Report{}, err
		}
	}

	slices.SortStableFunc(report.Problems, func(a, b Problem) int { return cmp.Or(strings.Compare(a.Page, b.Page), cmp.Compare(a.Line, b.Line)) })

	return report, nil
}

// page returns a page, from the cache if it was read before.
func (c *Checker) page(name string) (*page, error) {
	if p, known := c.pages[name]; known {
		return p, nil
	}

	text, err := os.ReadFile(filepath.Join(c.Root, name))
	if err != nil {
		return nil, fmt.Errorf("read page: %w", err)
	}

	c.pages[name] = parse(name, text)

	return c.pages[name], nil
}

func (c *Checker) check(ctx context.Context, p *page, report *Report) error {
	folder, err := os.MkdirTemp("", "docs-")
	if err != nil {
		return fmt.Errorf("create directory for files of %s: %w", p.name, err)
	}
	defer os.RemoveAll(folder) //nolint:errcheck // temporary

	r := &reading{Checker: c, page: p, report: report, folder: folder, made: map[string]bool{}}

	for name, given := range c.Given {
		if err := r.give(name, given); err != nil {
			return err
		}
	}

	r.links()
	r.spans(ctx)

	return r.blocks(ctx)
}

// reading is the check of one page.
type reading struct {
	*Checker

	page   *page
	report *Report
	// folder contains the files that the page shows. made has those and the files that its commands would create; the value is true if the file is in folder.
	folder string
	made   map[string]bool
	// mentions is true for commands within text, whose files need not exist.
	mentions bool
}

// give copies a file of the repository into folder.
func (r *reading) give(name, given string) error {
	content, err := os.ReadFile(filepath.Join(r.Root, given))
	if err != nil {
		return fmt.Errorf("read content of %s: %w", name, err)
	}

	return r.make(name, string(content))
}

// make creates a file that the page shows.
func (r *reading) make(name, content string) error {
	r.made[name] = true

	return os.WriteFile(filepath.Join(r.folder, name), []byte(content), 0o600)
}

func (r *reading) problem(line int, format string, args ...any) {
	r.report.Problems = append(r.report.Problems, Problem{Page: r.page.name, Line: line, Text: fmt.Sprintf(format, args...)})
}
