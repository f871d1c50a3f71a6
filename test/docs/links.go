package docs

import (
	"context"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// links checks that each link points to an existing file and anchor of the repository. Links to other hosts are not checked.
func (r *reading) links() {
	for _, link := range r.page.links {
		r.report.Links++

		target, err := url.Parse(link.text)

		switch {
		case err != nil:
			r.problem(link.line, "link %s: %v", link.text, err)
		case target.IsAbs():
		case strings.HasPrefix(target.Path, "/"):
			r.problem(link.line, "link %s: it is absolute, not relative to the page", link.text)
		default:
			r.link(link, target)
		}
	}
}

func (r *reading) link(link located, target *url.URL) {
	name := r.page.name
	if target.Path != "" {
		name = path.Join(path.Dir(name), target.Path)
	}

	if !filepath.IsLocal(name) {
		r.problem(link.line, "link %s: it points outside of the repository", link.text)

		return
	}

	if _, err := os.Stat(filepath.Join(r.Root, name)); err != nil {
		r.problem(link.line, "link %s: %s does not exist", link.text, name)

		return
	}

	if target.Fragment == "" {
		return
	}

	if path.Ext(name) != ".md" {
		r.problem(link.line, "link %s: only pages have anchors", link.text)

		return
	}

	p, err := r.Checker.page(name)
	if err != nil {
		r.problem(link.line, "link %s: %v", link.text, err)

		return
	}

	if !p.anchors[target.Fragment] {
		r.problem(link.line, "link %s: %s has no heading for #%s", link.text, name, target.Fragment)
	}
}

var (
	sourcePath = regexp.MustCompile(`^(?:\.ci|cmd|docs|extension|packaging|pkg|test)/[\w./-]+$`)
	variable   = regexp.MustCompile(`^(TALOS_CCM_[A-Z0-9_]+)(?:=|$)`)
	assignment = regexp.MustCompile(`^(--[a-z0-9-]+)=\S+$`)
	ourCommand = regexp.MustCompile(`^(?:kubectl|make|talos-ccm|talosctl) [a-z-]`)
)

// ours has the variables with the prefix of talos-ccm that are not flags: variables of the Makefile and of tests.
var ours = map[string]bool{"TALOS_CCM_CACHE": true, "TALOS_CCM_LOGS": true}

// spans checks code within text that names a path, variable or command of this project.
func (r *reading) spans(ctx context.Context) {
	r.mentions = true
	defer func() { r.mentions = false }()

	for _, span := range r.page.spans {
		switch {
		case sourcePath.MatchString(span.text):
			if _, err := os.Stat(filepath.Join(r.Root, span.text)); err != nil {
				r.problem(span.line, "%s does not exist", span.text)
			}
		case variable.MatchString(span.text):
			r.variable(span, variable.FindStringSubmatch(span.text)[1])
		case assignment.MatchString(span.text) && r.product.commands[""][assignment.FindStringSubmatch(span.text)[1]] == takesValue:
			if err := r.product.accepts(nil, span.text); err != nil {
				r.problem(span.line, "%s: %v", span.text, err)
			}
		case ourCommand.MatchString(span.text):
			r.commands(ctx, span)
		}
	}
}

// variable checks a variable of talos-ccm, and its value if it has one.
func (r *reading) variable(span located, name string) {
	switch {
	case ours[name]:
	case !r.product.variables[name]:
		r.problem(span.line, "%s: talos-ccm has no such flag", name)
	case span.text != name:
		if err := r.product.accepts([]string{span.text}); err != nil {
			r.problem(span.line, "%s: %v", span.text, err)
		}
	}
}
