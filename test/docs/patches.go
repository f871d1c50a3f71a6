package docs

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/yuin/goldmark"
	markdown "github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/text"
	"sigs.k8s.io/yaml"
)

// Patch is a patch of the machine configuration.
type Patch struct {
	// Position is the file and line.
	Position string
	// Text is the patch.
	Text string
	// Created are the versions of Talos for whose clusters the patch is, from the comment in its first line; nil for all.
	Created []string
	// ControlPlane is true if the patch is not for workers.
	ControlPlane bool
}

var (
	created   = regexp.MustCompile(`^#.* created with Talos ([\d. or]+)`)
	argument  = regexp.MustCompile(`--patch '([^']*)'`)
	fieldSpan = regexp.MustCompile("`((?:machine|cluster)(?:\\.[a-z]\\w*)+)(: [^`\n]+)?`")
	fieldName = regexp.MustCompile(`\b(?:machine|cluster)(?:\.[a-z]\w*)+`)
	notField  = regexp.MustCompile(`^cluster\.(?:local|x)$|^machine\.(?:sock|json|yaml)$`)
	inMessage = regexp.MustCompile(`\b(?:cluster|machine): \{[^;]*\}`)
	// examples are values of fields whose parents are in all clusters.
	examples = map[string]string{
		"machine.nodeAnnotations": "{a: b}", "machine.nodeLabels": "{a: b}", "machine.nodeTaints": "{a: NoSchedule}",
	}
	// replaced matches the kinds of documents that replace fields in clusters created with Talos 1.14.
	replaced = regexp.MustCompile(`\b(?:Kube[a-zA-Z]+|UnattendedInstall)Config\b`)
)

// Patches returns the patches of all pages, and of the fields that pages and messages of the program name.
func Patches(root string) ([]Patch, error) {
	pages, err := Pages(root)
	if err != nil {
		return nil, err
	}

	var patches []Patch

	for _, name := range slices.Sorted(maps.Keys(pages)) {
		patches = append(patches, ofPage(name, pages[name])...)
	}

	for _, directory := range []string{"cmd", "extension", "pkg"} {
		err := filepath.WalkDir(filepath.Join(root, directory), func(name string, _ os.DirEntry, err error) error {
			if err != nil || filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
				return err
			}

			found, err := ofMessages(name)
			patches = append(patches, found...)

			return err
		})
		if err != nil {
			return nil, err
		}
	}

	return patches, nil
}

func ofPage(name string, source []byte) (patches []Patch) {
	position := func(offset int) string {
		return fmt.Sprintf("%s:%d", name, bytes.Count(source[:offset], []byte("\n"))+1)
	}

	_ = markdown.Walk(goldmark.DefaultParser().Parse(text.NewReader(source)), func(node markdown.Node, entering bool) (markdown.WalkStatus, error) {
		block, isBlock := node.(*markdown.FencedCodeBlock)
		if !entering || !isBlock {
			return markdown.WalkContinue, nil
		}

		content := string(block.Lines().Value(source))

		switch language := string(block.Language(source)); {
		case language == "yaml" && isMachineConfig(content):
			patches = append(patches, ofBlock(position(block.Pos()), content))
		case language == "sh":
			for _, match := range argument.FindAllStringSubmatch(content, -1) {
				patches = append(patches, Patch{Position: position(block.Pos()), Text: match[1]})
			}
		}

		return markdown.WalkContinue, nil
	})

	for _, match := range fieldSpan.FindAllSubmatchIndex(source, -1) {
		name, value := string(source[match[2]:match[3]]), string(source[max(match[4], 0):max(match[5], 0)])
		patches = append(patches, ofField(position(match[0]), name, strings.TrimPrefix(value, ": "), paragraph(source, match[0])))
	}

	return patches
}

// ofBlock returns the patch in a block.
func ofBlock(position, content string) Patch {
	comment, _, _ := strings.Cut(content, "\n")
	patch := Patch{Position: position, Text: content, ControlPlane: strings.HasPrefix(comment, "#") && strings.Contains(comment, "control-plane machines")}

	if match := created.FindStringSubmatch(comment); match != nil {
		patch.Created = strings.Split(match[1], " or ")
	}

	return patch
}

// ofField returns a patch that sets a field that a text names. Without a value it sets only the objects that contain the
// field.
func ofField(position, name, value, text string) Patch {
	var patch strings.Builder

	for i, key := range strings.Split(name, ".") {
		fmt.Fprintf(&patch, "\n%s%s:", strings.Repeat(" ", i), key)
	}

	if value == "" {
		value = examples[name]
	}

	return Patch{Position: position, Text: patch.String() + " " + value, Created: versionsOf(text), ControlPlane: true}
}

// versionsOf returns the versions of clusters without documents if a text also names the document.
func versionsOf(text string) []string {
	if replaced.MatchString(text) {
		return []string{"1.12", "1.13"}
	}

	return nil
}

// paragraph returns the paragraph or the row of a table at an offset.
func paragraph(source []byte, offset int) string {
	separator := []byte("\n\n")
	if start := bytes.LastIndexByte(source[:offset], '\n') + 1; source[start] == '|' {
		separator = separator[:1]
	}

	after, _, _ := bytes.Cut(source[offset:], separator)

	return string(source[bytes.LastIndex(source[:offset], separator)+1:offset]) + string(after)
}

func isMachineConfig(content string) bool {
	return slices.ContainsFunc(strings.Split(content, "\n---\n"), func(document string) bool {
		var keys map[string]any

		return yaml.Unmarshal([]byte(document), &keys) == nil && (keys["apiVersion"] == "v1alpha1" || keys["machine"] != nil || keys["cluster"] != nil)
	})
}

// ofMessages returns the patches in string literals, and the fields that they name.
func ofMessages(name string) (patches []Patch, err error) {
	files := token.NewFileSet()

	file, err := parser.ParseFile(files, name, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}

	ast.Inspect(file, func(node ast.Node) bool {
		switch node.(type) {
		case *ast.AssignStmt, *ast.ExprStmt, *ast.ReturnStmt, *ast.ValueSpec:
		default:
			return true
		}

		text, position := literals(node), files.Position(node.Pos()).String()

		for _, example := range inMessage.FindAllString(text, -1) {
			patches = append(patches, Patch{Position: position, Text: example, Created: versionsOf(text), ControlPlane: true})
		}

		for _, field := range fieldName.FindAllString(text, -1) {
			if !notField.MatchString(field) {
				patches = append(patches, ofField(position, field, "", text))
			}
		}

		return true
	})

	return patches, nil
}

// literals returns the string literals in a node.
func literals(node ast.Node) (text string) {
	ast.Inspect(node, func(node ast.Node) bool {
		if literal, isLiteral := node.(*ast.BasicLit); isLiteral && literal.Kind == token.STRING {
			value, _ := strconv.Unquote(literal.Value)
			text += value + " "
		}

		return true
	})

	return text
}
