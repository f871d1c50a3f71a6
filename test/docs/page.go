package docs

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

// page is a parsed Markdown file.
type page struct {
	name    string
	anchors anchors
	links   []located
	// spans has the code spans.
	spans  []located
	blocks []block
}

// located is text and the line where it starts.
type located struct {
	line int
	text string
}

// block is a code block. Language and purpose are the first two words after the fence, or empty.
type block struct {
	located

	language, purpose string
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

func parse(name string, source []byte) *page {
	p := &page{name: name, anchors: anchors{}}
	markdown := goldmark.New(goldmark.WithExtensions(extension.GFM), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
	root := markdown.Parser().Parse(text.NewReader(source), parser.WithContext(parser.NewContext(parser.WithIDs(p.anchors))))

	// Nothing below returns an error.
	_ = ast.Walk(root, func(node ast.Node, entering bool) (ast.WalkStatus, error) {
		if entering {
			p.add(node, source)
		}

		return ast.WalkContinue, nil
	})

	return p
}

func (p *page) add(node ast.Node, source []byte) {
	line := bytes.Count(source[:max(node.Pos(), 0)], []byte("\n")) + 1

	switch n := node.(type) {
	case *ast.Link:
		p.links = append(p.links, located{line, string(n.Destination)})
	case *ast.Image:
		p.links = append(p.links, located{line, string(n.Destination)})
	case *ast.AutoLink:
		p.links = append(p.links, located{line, string(n.URL(source))})
	case *ast.RawHTML:
		p.addHTML(line, n.Segments.Value(source))
	case *ast.HTMLBlock:
		p.addHTML(line, n.Lines().Value(source))
	case *ast.CodeSpan:
		var span []byte

		for child := n.FirstChild(); child != nil; child = child.NextSibling() {
			if t, isText := child.(*ast.Text); isText {
				span = append(span, t.Value(source)...)
			}
		}

		p.spans = append(p.spans, located{line, strings.ReplaceAll(string(span), "\n", " ")})
	case *ast.FencedCodeBlock:
		b := block{located: located{line + 1, string(n.Lines().Value(source))}}
		if n.Info != nil {
			b.language, b.purpose, _ = strings.Cut(string(n.Info.Value(source)), " ")
		}

		p.blocks = append(p.blocks, b)
	case *ast.CodeBlock:
		p.blocks = append(p.blocks, block{located: located{line, string(n.Lines().Value(source))}})
	}
}

var htmlAttribute = regexp.MustCompile(`\b(?:(href|src|srcset)|id|name)="([^"]+)"`)

func (p *page) addHTML(line int, html []byte) {
	for _, match := range htmlAttribute.FindAllSubmatch(html, -1) {
		if len(match[1]) > 0 {
			p.links = append(p.links, located{line, string(match[2])})
		} else {
			p.anchors.Put(match[2])
		}
	}
}
