// Package docs checks the project's documents: every link and anchor leads somewhere, every block says what it is made of, and is read as the program reads
// it that it is for: machine configuration by Talos's loader, objects by Kubernetes' types, configuration files by ours, commands by a shell's parser and against
// what their programs offer. Commands of talos-ccm that need no cluster are run. It asks no other machine for anything, and changes no file.
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

// Checker checks documents of one repository.
type Checker struct {
	// Root is the repository's folder.
	Root string
	// Binary is talos-ccm.
	Binary string
	// Given are files that a reader has without making them on the page, such as what talosctl has printed: name to path in the repository.
	Given map[string]string

	makefile makefile
	product  product
	pages    map[string]*page
}

// Problem is something that does not hold in a document.
type Problem struct {
	Page string
	Line int
	Text string
}

// String is the problem with its place, as compilers write it.
func (p Problem) String() string { return fmt.Sprintf("%s:%d: %s", p.Page, p.Line, p.Text) }

// Report is what has been checked, and what does not hold.
type Report struct {
	Pages, Links int
	// Snippets are the blocks that were read as what they are, and Output those that nobody reads: what somebody sees.
	Snippets, Output int
	// Run, Parsed and Named are commands: those of talos-ccm that were run, those whose arguments were held against what their program takes, and those of which
	// no more than the name was.
	Run, Parsed, Named int
	Problems           []Problem
}

// String is the report's one line.
func (r Report) String() string {
	return fmt.Sprintf("%d pages: %d links, %d snippets read and %d of output not; of the commands %d run, %d held against what their programs take, %d known by name; %d broken",
		r.Pages, r.Links, r.Snippets, r.Output, r.Run, r.Parsed, r.Named, len(r.Problems))
}

// Pages are the documents of the repository in root: those at its top, and all below docs.
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
			return nil, fmt.Errorf("list the documents in %s: %w", folder, err)
		}
	}

	return pages, nil
}

// Check checks pages, whose paths are relative to the root.
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

// page reads a page, once.
func (c *Checker) page(name string) (*page, error) {
	if p, known := c.pages[name]; known {
		return p, nil
	}

	text, err := os.ReadFile(filepath.Join(c.Root, name))
	if err != nil {
		return nil, fmt.Errorf("read a document: %w", err)
	}

	c.pages[name] = parse(name, text)

	return c.pages[name], nil
}

func (c *Checker) check(ctx context.Context, p *page, report *Report) error {
	folder, err := os.MkdirTemp("", "docs-")
	if err != nil {
		return fmt.Errorf("make a folder for the files of %s: %w", p.name, err)
	}
	defer os.RemoveAll(folder) //nolint:errcheck // it is temporary

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

// reading goes through one page.
type reading struct {
	*Checker

	page   *page
	report *Report
	// folder has the files that the page shows, made those that its commands would make; true: in folder, false: nobody knows what is in them.
	folder string
	made   map[string]bool
	// mentions says that commands are mentioned within text, where their files need not be.
	mentions bool
}

// give puts a file of the repository before the reader.
func (r *reading) give(name, given string) error {
	content, err := os.ReadFile(filepath.Join(r.Root, given))
	if err != nil {
		return fmt.Errorf("read what %s holds: %w", name, err)
	}

	return r.make(name, string(content))
}

// make makes a file that the page shows.
func (r *reading) make(name, content string) error {
	r.made[name] = true

	return os.WriteFile(filepath.Join(r.folder, name), []byte(content), 0o600)
}

func (r *reading) problem(line int, format string, args ...any) {
	r.report.Problems = append(r.report.Problems, Problem{Page: r.page.name, Line: line, Text: fmt.Sprintf(format, args...)})
}
