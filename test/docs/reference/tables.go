package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// tables has the items of lists by kind or, except for metrics, by kind and directory, such as "events pkg/ccm".
type tables map[string]string

// take removes and returns the list of a kind with the items of directories, both separated by spaces.
func (t tables) take(spec string) string {
	kind, dirs, _ := strings.Cut(spec, " ")

	var list strings.Builder

	for dir := range strings.SplitSeq(dirs, " ") {
		key := strings.TrimSpace(kind + " " + dir)
		list.WriteString(t[key])
		delete(t, key)
	}

	return list.String()
}

// add appends an item. Paths of headings become links.
func (t tables) add(key, text string) {
	t[key] += item(headingPath.ReplaceAllStringFunc(strings.TrimSuffix(text, ".")+".", link))
}

// scan adds the constants and metrics of all packages in a directory of the repository.
func (t tables) scan(directory string) error {
	return filepath.WalkDir(filepath.Join(root, directory), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}

		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			return err
		}

		dir, err := filepath.Rel(root, filepath.Dir(path))

		for node := range ast.Preorder(file) {
			switch n := node.(type) {
			case *ast.GenDecl:
				err = errors.Join(err, t.constants(dir, n))
			case *ast.CallExpr:
				t.metric(n)
			}
		}

		return err
	})
}

var (
	labelName = regexp.MustCompile(`(?i)label|annotation`)
	// eventComment matches the first paragraph of the comment of a reason, after the name.
	eventComment = regexp.MustCompile(`^(?:: (.+)\. Fix: (.+)| (\(Normal\)): (.+))\.$`)
)

// constants adds the reasons of Events, labels and annotations in a declaration.
func (t tables) constants(dir string, decl *ast.GenDecl) error {
	for _, spec := range decl.Specs {
		value, isValue := spec.(*ast.ValueSpec)
		if !isValue || decl.Tok != token.CONST || len(value.Values) != 1 {
			continue
		}

		name, code := value.Names[0].Name, "`"+literal(value.Values[0])+"`"
		doc := value.Doc

		if !decl.Lparen.IsValid() {
			doc = decl.Doc
		}

		paragraph, _, _ := strings.Cut(doc.Text(), "\n\n")
		comment := strings.TrimPrefix(strings.Join(strings.Fields(paragraph), " "), name)

		switch {
		case strings.HasPrefix(name, "Reason"):
			match := eventComment.FindStringSubmatch(comment)
			if match == nil {
				return fmt.Errorf("%s of %s: want the comment %[1]s: cause. Fix: fix. or %[1]s (Normal): cause", name, dir)
			}

			t.add("events "+dir, event(code, match))
		case !labelName.MatchString(name) || !strings.Contains(code, "/"):
		case comment == "":
			return fmt.Errorf("%s of %s: want a comment", name, dir)
		default:
			t.add("labels "+dir, code+": "+verb.ReplaceAllString(strings.TrimSpace(comment), ""))
		}
	}

	return nil
}

// event returns the item of an Event.
func event(code string, match []string) string {
	if match[2] == "" {
		return code + " " + match[3] + ": " + match[4]
	}

	return code + ": " + match[1] + ". Fix: " + match[2]
}

var (
	constructor = regexp.MustCompile(`^New(Counter|Gauge|Histogram)(Vec)?$`)
	// number matches what the text of a metric begins with and a list does not need.
	number = regexp.MustCompile(`^Number of (times that )?`)
)

// metric adds the metric that a call of package metric creates.
func (t tables) metric(call *ast.CallExpr) {
	function, _ := call.Fun.(*ast.SelectorExpr)
	if function == nil {
		return
	}

	from, _ := function.X.(*ast.Ident)
	if !constructor.MatchString(function.Sel.Name) || from == nil || from.Name != "metric" {
		return
	}

	var args []string

	for _, arg := range call.Args {
		if text := literal(arg); text != "" {
			args = append(args, text)
		}
	}

	name := args[0]
	if len(args) > 2 {
		name += "{" + strings.Join(args[2:], ",") + "}"
	}

	t.add("metrics", "`"+name+"`: "+number.ReplaceAllString(args[1], ""))
}

// literal returns the value of a string literal or of a sum of literals; empty for other expressions.
func literal(expression ast.Expr) string {
	switch e := expression.(type) {
	case *ast.BasicLit:
		text, _ := strconv.Unquote(e.Value)

		return text
	case *ast.BinaryExpr:
		return literal(e.X) + literal(e.Y)
	default:
		return ""
	}
}

var headingPath = regexp.MustCompile(`docs/[\w/-]+\.md#[\w-]+`)

// link returns a link from docs/reference to a heading. A test of the pages fails if there is no such heading.
func link(target string) string {
	name, anchor, _ := strings.Cut(target, "#")
	page, _ := os.ReadFile(filepath.Join(root, name))

	for line := range strings.Lines(string(page)) {
		heading := strings.TrimSpace(strings.TrimLeft(line, "#"))
		if line[0] == '#' && strings.ReplaceAll(strings.ToLower(heading), " ", "-") == anchor {
			return fmt.Sprintf("[%s](../%s)", heading, strings.TrimPrefix(target, "docs/"))
		}
	}

	return fmt.Sprintf("[%s](../%s)", target, strings.TrimPrefix(target, "docs/"))
}
