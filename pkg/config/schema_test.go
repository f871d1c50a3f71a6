package config_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

func compiledSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()

	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(config.Schema))
	if err != nil {
		t.Fatal(err)
	}

	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)

	if err := compiler.AddResource("schema.json", document); err != nil {
		t.Fatal(err)
	}

	schema, err := compiler.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}

	return schema
}

// validate checks a file against the schema as an editor does, after parsing it as YAML.
func validate(t *testing.T, schema *jsonschema.Schema, file string) error {
	t.Helper()

	var content any

	loader, err := yaml.NewLoader(bytes.NewReader([]byte(file)))
	if err != nil {
		t.Fatal(err)
	}

	if err := loader.Load(&content); errors.Is(err, io.EOF) {
		content = map[string]any{}
	} else if err != nil {
		t.Fatal(err)
	}

	asJSON, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}

	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
	if err != nil {
		t.Fatal(err)
	}

	return schema.Validate(value)
}

func TestSchema_AcceptsValidFiles(t *testing.T) {
	schema := compiledSchema(t)

	for _, test := range goodFiles() {
		t.Run(test.name, func(t *testing.T) {
			if err := validate(t, schema, test.file); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSchema_RefusesInvalidFiles also asserts which files the schema does not refuse, so that improvements are
// noticed.
func TestSchema_RefusesInvalidFiles(t *testing.T) {
	schema := compiledSchema(t)

	for _, test := range badFiles() {
		if !test.bySchema && isUnreadable(test.file) {
			continue
		}

		t.Run(test.name, func(t *testing.T) {
			if err := validate(t, schema, test.file); (err != nil) != test.bySchema {
				t.Errorf("got %v, want an error: %t", err, test.bySchema)
			}
		})
	}
}

// isUnreadable reports whether the file is invalid YAML or cannot be converted to JSON.
func isUnreadable(file string) bool {
	var content any

	if err := yaml.Load([]byte(file), &content); err != nil {
		return true
	}

	_, err := json.Marshal(content)

	return err != nil
}
