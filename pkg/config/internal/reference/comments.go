package main

import (
	"reflect"
	"strings"

	"github.com/invopop/jsonschema"
)

// importPath is that of the working folder.
const importPath = "github.com/talos-ccm/talos-ccm/pkg/config"

// comments are the first sentences of those of types ("import path.Type") and the comments of their fields ("import path.Type.Field").
type comments map[string]string

// readComments reads the sources of package config, which is the working folder, and of package transform beside it.
func readComments() (comments, error) {
	var r jsonschema.Reflector

	for _, folder := range []string{".", "../transform"} {
		if err := r.AddGoComments(importPath, folder); err != nil {
			return nil, err
		}
	}

	return r.CommentMap, nil
}

// of is what the comment says of a type, or of one of its fields under the name that the file has for it.
func (c comments) of(t reflect.Type, field string) string {
	key := t.PkgPath() + "." + t.Name()
	if field == "" {
		return inOneLine(c[key])
	}

	text := inOneLine(c[key+"."+field])

	if f, found := t.FieldByName(field); found {
		if rest, named := strings.CutPrefix(text, field+" "); named {
			text = keyOf(f) + " " + rest
		}
	}

	return text
}

func inOneLine(s string) string {
	return strings.Join(strings.Fields(s), " ")
}

// keyOf is the field's name in the file.
func keyOf(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")

	return name
}

// isRequired tells whether the file must have the field.
func isRequired(f reflect.StructField) bool {
	_, _, optional := strings.Cut(f.Tag.Get("json"), ",")

	return !optional
}
