package docs

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"
)

// page is a parsed Markdown file.
type page struct {
	name    string
	anchors map[string]bool
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

// block is a code block.
type block struct {
	// line is the number of the first line of code.
	line int
	// language and purpose are the first two words after the fence, or empty.
	language, purpose string
	text              string
}

var (
	htmlLink   = regexp.MustCompile(`\b(?:href|src|srcset)="([^"]+)"`)
	htmlAnchor = regexp.MustCompile(`\b(?:id|name)="([^"]+)"`)
)

func parse(name string, source []byte) *page {
	p := &page{name: name, anchors: map[string]bool{}}
	root := goldmark.New(goldmark.WithExtensions(extension.GFM)).Parser().Parse(text.NewReader(source))

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
	line := lineOf(node, source)

	switch n := node.(type) {
	case *ast.Heading:
		p.addAnchor(slug(plain(n, source)))
	case *ast.Link:
		p.links = append(p.links, located{line, string(n.Destination)})
	case *ast.Image:
		p.links = append(p.links, located{line, string(n.Destination)})
	case *ast.AutoLink:
		p.links = append(p.links, located{line, string(n.URL(source))})
	case *ast.RawHTML:
		p.addHTML(line, string(n.Segments.Value(source)))
	case *ast.HTMLBlock:
		p.addHTML(line, string(n.Lines().Value(source)))
	case *ast.CodeSpan:
		p.spans = append(p.spans, located{line, strings.ReplaceAll(plain(n, source), "\n", " ")})
	case *ast.FencedCodeBlock:
		var info string
		if n.Info != nil {
			info = string(n.Info.Value(source))
		}

		language, purpose, _ := strings.Cut(info, " ")
		p.blocks = append(p.blocks, block{line, language, strings.TrimSpace(purpose), string(n.Lines().Value(source))})
	case *ast.CodeBlock:
		p.blocks = append(p.blocks, block{line: line, text: string(n.Lines().Value(source))})
	}
}

func (p *page) addHTML(line int, html string) {
	for _, match := range htmlLink.FindAllStringSubmatch(html, -1) {
		p.links = append(p.links, located{line, match[1]})
	}

	for _, match := range htmlAnchor.FindAllStringSubmatch(html, -1) {
		p.anchors[match[1]] = true
	}
}

// addAnchor adds the anchor of a heading. Duplicates get a number, as on GitHub.
func (p *page) addAnchor(name string) {
	unique := name
	for i := 1; p.anchors[unique]; i++ {
		unique = fmt.Sprintf("%s-%d", name, i)
	}

	p.anchors[unique] = true
}

// slug returns the anchor of a heading as on GitHub: lower case, hyphens for spaces, no punctuation or symbols.
func slug(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r) || unicode.IsMark(r):
			return unicode.ToLower(r)
		default:
			return -1
		}
	}, strings.TrimSpace(heading))
}

// plain returns the text of a node without markup.
func plain(node ast.Node, source []byte) string {
	var b strings.Builder

	for child := node.FirstChild(); child != nil; child = child.NextSibling() {
		switch n := child.(type) {
		case *ast.Text:
			b.Write(n.Value(source))

			if n.SoftLineBreak() {
				b.WriteByte(' ')
			}
		case *ast.String:
			b.Write(n.Value)
		default:
			b.WriteString(plain(child, source))
		}
	}

	return b.String()
}

// lineOf returns the line of the first text in node, or of the block that contains it.
func lineOf(node ast.Node, source []byte) int {
	for n := node; n != nil; n = n.Parent() {
		if offset, found := offsetOf(n); found {
			return bytes.Count(source[:offset], []byte("\n")) + 1
		}
	}

	return 1
}

func offsetOf(node ast.Node) (int, bool) {
	switch n := node.(type) {
	case *ast.Text:
		return n.Segment.Start, true
	case *ast.RawHTML:
		return n.Segments.At(0).Start, true
	}

	if node.Type() == ast.TypeBlock && node.Lines().Len() > 0 {
		return node.Lines().At(0).Start, true
	}

	if node.Type() == ast.TypeInline && node.FirstChild() != nil {
		return offsetOf(node.FirstChild())
	}

	return 0, false
}
